"""The generators of a rank go on where they were packed, and say whose they are."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.worker.saved_state.rng_state import (
    generators_fault,
    origin_fault,
    pack_rng,
    rng_name,
    seed_by_data,
    seed_generators,
    set_origin,
    unpack_rng,
)

INTEROP = Path(__file__).resolve().parents[4] / ".venv" / "interop"
WITH_NUMPY = """
import json, random, sys, torch
from trainer.worker.saved_state.rng_state import pack_rng, seed_generators, unpack_rng
def drawn():
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
print(json.dumps(found))
"""

OTHER_GENERATORS = """
import json, numpy, torch
from trainer.worker.saved_state.rng_state import generators_fault, pack_rng, seed_generators, unpack_rng
CPU, rows, found = torch.device("cpu"), {}, {}
def drawn():
    random = numpy.random
    return [random.randn(3).tolist(), random.randint(100, size=3, dtype=numpy.int32).tolist(), random.rand()]
for kind in ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"):
    numpy.random.set_bit_generator(getattr(numpy.random, kind)(3))
    seeded = []
    for seed in (7, 7, 8):
        seed_generators(seed)
        seeded.append(drawn())
    numpy.random.randn()  # leaves half a pair
    rows[kind] = pack_rng(CPU)
    found[kind] = {"seeded": seeded, "fault": generators_fault(rows[kind]), "next": drawn(), "restored": []}
for kind in [*reversed(rows), *rows]:  # also where another kind is there
    unpack_rng(rows[kind], CPU)
    found[kind]["restored"].append(drawn())
class Large:
    state = {"bit_generator": "Large", "state": list(range(2000))}
numpy.random.get_state = lambda legacy: Large.state
try:
    pack_rng(CPU)
except Exception as error:
    found["large"] = str(error)
print(json.dumps(found))
"""


NUMBERS = """
import json, numpy as np, torch
from numbers import Real
from trainer.worker.saved_state.object_state import decode, encode
values = [np.float64(0.1), np.float32(0.1), np.int64(-3), np.complex64(1 + 2j), np.float16("nan")]
saved = json.loads(json.dumps(encode({"in": values}, "state", {}, {})))
made = decode(saved, {}, {})["in"]
print(json.dumps({at: [type(one).__name__, one.tobytes() == made.tobytes(),
                     type(one) is type(made), isinstance(one, Real)]
                  for at, (one, made) in enumerate(zip(values, made, strict=True))}))
"""


@pytest.fixture(scope="module")
def with_numpy() -> dict[str, dict[str, Any]]:
    """What each program found; one process runs them all, the first before anything has imported NumPy."""
    programs = {"seeded": WITH_NUMPY, "numbers": NUMBERS, "others": OTHER_GENERATORS}
    if not (INTEROP / ".ready").exists():
        pytest.skip("NumPy is not installed apart: `make .venv/interop/.ready` does that, as `make test` does")
    environ = {**os.environ, "PYTHONPATH": str(INTEROP)}
    command = [sys.executable, "-W", "error", "-c", "".join(programs.values())]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(zip(programs, map(json.loads, done.stdout.splitlines()), strict=True))


def test_every_kind_of_numpys_generator_is_seeded_and_restored(with_numpy: dict[str, dict[str, Any]]) -> None:
    found = with_numpy["others"]
    assert found["large"] == "the state of NumPy's Large is too large to be saved"
    kinds = [one for kind, one in found.items() if kind != "large"]
    assert len(kinds) == 5
    for one in kinds:
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
    found = with_numpy["numbers"]
    assert list(found.values()) == [
        [name, True, True, name != "complex64"] for name in ("float64", "float32", "int64", "complex64", "float16")
    ]
