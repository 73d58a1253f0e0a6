"""Process that imports NumPy only after its generators are seeded.

Its argument is the folder of NumPy. Prints what each function found, as JSON.
"""

import json
import random
import sys
import warnings
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch

from trainer.worker.saved_state.object_state import decode, encode
from trainer.worker.saved_state.rng_state import generators_fault, pack_rng, seed_generators, unpack_rng
from trainer.worker.workload import WorkloadError


def with_numpys_generator() -> dict[str, list[float]]:
    def drawn() -> list[float]:
        import numpy

        return [float(numpy.random.rand()), random.random(), torch.rand(()).item()]

    found = {}
    for name, seed in (("once", 7), ("again", 7), ("other", 8), ("large", 12345 * 1_000_003 + 5000)):
        seed_generators(seed)
        found[name] = drawn()
    packed = pack_rng(torch.device("cpu"))
    found["next"] = drawn()
    unpack_rng(packed, torch.device("cpu"))
    found["restored"] = drawn()
    return found


def with_other_generators() -> dict[str, Any]:
    import numpy

    rows, found = dict[str, torch.Tensor](), dict[str, Any]()

    def drawn() -> list[Any]:
        draw = numpy.random
        return [draw.randn(3).tolist(), draw.randint(100, size=3, dtype=numpy.int32).tolist(), draw.rand()]

    for kind in ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"):
        numpy.random.set_bit_generator(getattr(numpy.random, kind)(3))
        seeded = []
        for seed in (7, 7, 8):
            seed_generators(seed)
            seeded.append(drawn())
        numpy.random.randn()  # leaves half a pair
        rows[kind] = pack_rng(torch.device("cpu"))
        found[kind] = {"seeded": seeded, "fault": generators_fault(rows[kind]), "next": drawn(), "restored": []}
    for kind in [*reversed(rows), *rows]:  # also where another kind is there
        unpack_rng(rows[kind], torch.device("cpu"))
        found[kind]["restored"].append(drawn())
    del numpy.random.PCG64
    found["unknown"] = refusal(lambda: unpack_rng(rows["PCG64"], torch.device("cpu")))
    large = {"bit_generator": "Large", "state": list(range(2000))}
    numpy.random.get_state = lambda legacy: large
    found["large"] = refusal(lambda: pack_rng(torch.device("cpu")))
    return found


def refusal(act: Callable[[], object]) -> str:
    try:
        act()
    except WorkloadError as error:
        return str(error)
    return "accepted"


def with_numpys_numbers() -> dict[str, list[Any]]:
    import numpy as np

    values = [np.float64(0.1), np.float32(0.1), np.int64(-3), np.complex64(1 + 2j), np.float16("nan")]
    saved = json.loads(json.dumps(encode({"in": values}, "state", {}, {})))
    return {
        type(one).__name__: [one.tobytes() == made.tobytes(), type(one) is type(made), isinstance(one, Real)]
        for one, made in zip(values, decode(saved, {}, {})["in"], strict=True)
    }


def main() -> None:
    warnings.simplefilter("error")
    sys.modules.pop("numpy", None)  # may be None
    sys.path.append(sys.argv[1])
    found = {"seeded": with_numpys_generator(), "numbers": with_numpys_numbers(), "others": with_other_generators()}
    sys.stdout.write(json.dumps(found))
