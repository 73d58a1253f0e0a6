"""The generators of a rank go on where they were packed, and say whose they are."""

import json
import os
import random
import sys
import traceback
import warnings
from collections.abc import Callable
from numbers import Real
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.worker.data import mix
from trainer.worker.saved_state.object_state import decode, encode
from trainer.worker.saved_state.rng_state import (
    _parts,
    generators_fault,
    origin_fault,
    pack_rng,
    rng_name,
    seed_by_data,
    seed_generators,
    set_origin,
    unpack_rng,
)
from trainer.worker.workload import WorkloadError

INTEROP = Path(__file__).resolve().parents[4] / ".venv" / "interop"


def with_numpys_generator() -> dict[str, list[float]]:
    """The first of all: nothing has imported NumPy before it."""

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
    with pytest.raises(WorkloadError) as caught:
        act()
    return str(caught.value)


def with_numpys_numbers() -> dict[str, list[Any]]:
    import numpy as np

    values = [np.float64(0.1), np.float32(0.1), np.int64(-3), np.complex64(1 + 2j), np.float16("nan")]
    saved = json.loads(json.dumps(encode({"in": values}, "state", {}, {})))
    return {
        type(one).__name__: [one.tobytes() == made.tobytes(), type(one) is type(made), isinstance(one, Real)]
        for one, made in zip(values, decode(saved, {}, {})["in"], strict=True)
    }


@pytest.fixture(scope="module")
def with_numpy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each function found in a fork of this process, which is where NumPy is imported."""
    if not (INTEROP / ".ready").exists():
        pytest.skip("NumPy is not installed apart: `make .venv/interop/.ready` does that, as `make test` does")
    out = tmp_path_factory.mktemp("numpy") / "found.json"
    child = os.fork()
    if not child:
        try:
            warnings.simplefilter("error")
            sys.modules.pop("numpy", None)  # which may say that there is none
            sys.path.append(str(INTEROP))
            found = {"seeded": with_numpys_generator(), "numbers": with_numpys_numbers()}
            out.write_text(json.dumps({**found, "others": with_other_generators()}))
        except Exception:  # noqa: BLE001  # outermost edge of a forked child
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(0)
    os.waitpid(child, 0)
    found: dict[str, dict[str, Any]] = json.loads(out.read_text())
    return found


def test_every_kind_of_numpys_generator_is_seeded_and_restored(with_numpy: dict[str, dict[str, Any]]) -> None:
    found = with_numpy["others"]
    assert found.pop("large") == "the state of NumPy's Large is too large to be saved"
    assert found.pop("unknown") == (
        "the checkpoint has a state of NumPy's PCG64: set_bit_generator() it in build_data()"
    )
    assert len(found) == 5
    for one in found.values():
        assert one["fault"] == ""
        assert one["restored"] == [one["next"]] * 2
        assert one["seeded"][0] == one["seeded"][1] != one["seeded"][2]


def test_numpys_generator_is_seeded_and_restored_with_the_others(with_numpy: dict[str, dict[str, Any]]) -> None:
    found = with_numpy["seeded"]
    assert found["once"] == found["again"]
    assert found["next"] == found["restored"]
    for ours, other in zip(found["once"], found["other"], strict=True):
        assert ours != other


def test_without_numpy_the_others_are_seeded():
    drawn = []
    for _ in range(2):
        seed_generators(9)
        drawn.append((torch.rand(()).item(), random.random()))
    assert drawn[0] == drawn[1]


def test_generators_go_on_where_they_were_packed():
    torch.manual_seed(5)
    random.seed(5)
    random.gauss(0, 1)  # leaves half a pair behind, which belongs to the state
    packed = pack_rng(torch.device("cpu"))
    expected = (torch.rand(3), random.random(), random.gauss(0, 1))
    torch.manual_seed(6)
    random.seed(6)
    unpack_rng(packed, torch.device("cpu"))
    found = (torch.rand(3), random.random(), random.gauss(0, 1))
    assert torch.equal(found[0], expected[0])
    assert found[1:] == expected[1:]


def test_a_row_with_an_origin_is_as_long_and_gives_the_same_generators():
    """Its size is part of the plan of a checkpoint, and an older orch reads it too."""
    torch.manual_seed(5)
    random.seed(5)
    packed = pack_rng(torch.device("cpu"))
    marked = packed.clone()
    set_origin(marked, 3, 40)
    assert marked.shape == packed.shape
    assert generators_fault(marked) == ""
    expected = (torch.rand(3), random.random())
    unpack_rng(marked, torch.device("cpu"))
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]


def test_the_row_of_another_rank_or_step_is_told():
    packed = pack_rng(torch.device("cpu"))
    assert origin_fault(packed, rng_name(3), 40) == "", "an older orch did not write it down"
    set_origin(packed, 3, 40)
    assert origin_fault(packed, rng_name(3), 40) == ""
    assert origin_fault(packed, rng_name(2), 40) == "is the state of rank 3 at step 40, in a checkpoint of step 40"
    assert origin_fault(packed, rng_name(3), 50) == "is the state of rank 3 at step 40, in a checkpoint of step 50"
    length = (packed == 16).nonzero()[-1]
    packed[length] = 8
    assert origin_fault(packed, rng_name(3), 40) == "says in 8 bytes instead of 16 whose it is"


def first_draw(*, seed: int, dp_rank: int, step: int) -> float:
    seed_by_data(seed, dp_rank, step)
    return float(torch.rand(1, dtype=torch.float64))


def test_a_rank_that_comes_later_draws_what_no_other_one_draws_and_the_same_in_every_run() -> None:
    cases = [(seed, rank, step) for seed in (1, 2) for rank in range(8) for step in (0, 1, 40, 4000)]
    drawn = [first_draw(seed=seed, dp_rank=rank, step=step) for seed, rank, step in cases]
    assert len(set(drawn)) == len(cases)
    assert drawn == [first_draw(seed=seed, dp_rank=rank, step=step) for seed, rank, step in cases]


def test_numbers_of_numpy_in_a_state_come_back_as_they_were(with_numpy: dict[str, dict[str, Any]]) -> None:
    assert with_numpy["numbers"] == {
        name: [True, True, name != "complex64"] for name in ("float64", "float32", "int64", "complex64", "float16")
    }


def test_a_row_may_end_after_its_last_part_or_a_few_bytes_later() -> None:
    packed = pack_rng(torch.device("cpu"))
    end = sum(8 + len(part) for part in _parts(packed))
    for more in range(9):
        assert generators_fault(packed[: end + more]) == ""
    assert "ends before" in generators_fault(packed[: end - 1])


def test_the_seeds_of_a_rank_are_the_same_in_every_release() -> None:
    """A checkpoint of a smaller world goes on with the numbers that it would have drawn before an upgrade."""
    for token_rank, step, due in (
        (0, 0, 7_000_021), (3, 0, 7_000_024), (3, 40, mix(7_000_024 ^ mix(40)) >> 1), (2**61, 0, 7_000_021 + 2**61),
        (2**63, 0, 7_000_021),
    ):  # fmt: skip
        seed_by_data(7, token_rank, step)
        assert torch.initial_seed() == due
