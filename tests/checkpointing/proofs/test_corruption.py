"""Damage of every kind is refused before a byte reaches the model; counts what plain DCP does with the same damage."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpointing.engine.collectives.group import FAILURES
from checkpointing.errors import NothingVerifies
from checkpointing.format.manifest import FINGERPRINTS, INDEX
from checkpointing.verification.verify import verify
from tests.checkpointing.proofs.faults import FAULTS, Damage, damage, flipped_bit, regions
from tests.checkpointing.proofs.world import World, fresh_copy, marked, plain_load, same, state

SAMPLE, CHUNK = 3 * len(FAULTS), 250
LOADED_WRONG, LOADED_RIGHT, RAISED = "loaded silently wrong", "loaded right", "raised"


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Steps 1 and 2 in two shard files each, of the same names and sizes."""
    world = World(tmp_path_factory.mktemp("healthy"))
    world.save(1, 2, files=2)
    return world


def outcome_under_dcp(folder: Path, right: dict[str, torch.Tensor]) -> str:
    """What plain `dcp.load` does with the same folder."""
    target = marked(right)
    try:
        plain_load(folder, target)
    except FAILURES:
        return RAISED
    return LOADED_RIGHT if same(target, right) else LOADED_WRONG


def prove(healthy: World, place: Path, seeds: range) -> Counter[str]:
    """Every fault is refused, the model untouched, an older checkpoint loaded; counts the results of DCP."""
    outcomes: Counter[str] = Counter()
    alone, both = World(place / "alone"), World(place / "both")
    right, older = state(2), state(1)
    fresh_copy(healthy.folder(1), both.folder(1))
    with alone.checkpointer() as lone, both.checkpointer() as pair:
        for seed in seeds:
            fresh_copy(healthy.folder(2), alone.folder(2))
            done = damage(alone.folder(2), healthy.folder(1), seed)
            outcomes[outcome_under_dcp(alone.folder(2), right)] += 1
            assert_refused(alone, lone, done, seed)
            if seed % 5 == 0:
                fresh_copy(alone.folder(2), both.folder(2))
                target = marked(right)
                restored = pair.restore(target)
                assert restored is not None, (seed, done)
                assert (restored.step, same(target, older)) == (1, True), (seed, done)
    return outcomes


def assert_refused(world: World, made: object, done: Damage, seed: int) -> None:
    target = marked(state(2))
    assert not verify(world.folder(2), 2).ok, (seed, done)
    with pytest.raises(NothingVerifies):
        made.restore(target)  # type: ignore[attr-defined]
    assert same(target, marked(target)), (seed, done)


def test_a_sample_of_every_kind_is_refused(healthy: World, tmp_path: Path) -> None:
    outcomes = prove(healthy, tmp_path, range(SAMPLE))
    assert outcomes.total() == SAMPLE
    assert outcomes[LOADED_WRONG] > 0, "the comparison with DCP compares nothing"


@pytest.mark.proof
@pytest.mark.parametrize("first", range(0, 1000, CHUNK))
def test_a_thousand_faults_are_refused(
    healthy: World, tmp_path: Path, first: int, record_property: Callable[[str, object], None]
) -> None:
    outcomes = prove(healthy, tmp_path, range(first, first + CHUNK))
    record_property("faults refused with the model untouched", CHUNK)
    for outcome in (LOADED_WRONG, RAISED, LOADED_RIGHT):
        record_property(f"plain DCP {outcome}", outcomes[outcome])


def test_the_thousand_reach_every_region_of_every_file(healthy: World, tmp_path: Path) -> None:
    folder = healthy.folder(2)
    found = regions(folder)
    assert {region.file for region in found} == {path.name for path in folder.iterdir()}
    assert {INDEX, FINGERPRINTS, ".metadata"} <= {region.file for region in found}
    assert {region.what for region in found} == {"head", "values", "tail", "padding", "text"}
    for path in folder.iterdir():
        ordered = sorted((r for r in found if r.file == path.name), key=lambda r: r.start)
        assert [r.end for r in ordered[:-1]] == [r.start for r in ordered[1:]], "regions leave no byte out"
        assert (ordered[0].start, ordered[-1].end) == (0, path.stat().st_size)
    flips = len([seed for seed in range(1000) if FAULTS[seed % len(FAULTS)] is flipped_bit])
    assert flips >= len(found)


def random_state(seed: int) -> dict[str, torch.Tensor]:
    """Any number of tensors of any dtype and shape: scalars and empty ones too."""
    draw, torch_draw = random.Random(seed), torch.Generator().manual_seed(seed)
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)
    tensors = {}
    for number in range(draw.randrange(1, 12)):
        shape = [draw.choice([0, 1, 2, 3, 17, 64]) for _ in range(draw.randrange(4))]
        tensors[f"model.t{number}"] = torch.randint(0, 2**15, shape, generator=torch_draw).to(draw.choice(kinds))
    return tensors


def assert_accepted(place: Path, seeds: range) -> None:
    for seed in seeds:
        world, right = World(place / str(seed)), random_state(seed)
        with world.checkpointer(files=1 + seed % 3) as made:
            made.prepare(right)
            made.save(1, right, {})
            made.wait()
            target = {key: torch.zeros_like(tensor) for key, tensor in right.items()}
            restored = made.restore(target)
        assert restored is not None, (seed, world.events)
        assert same(target, right), seed
        assert verify(world.root / restored.name, 2).ok, seed
        assert world.reported("checkpoint.refused") == []


def test_healthy_ones_are_accepted(tmp_path: Path) -> None:
    assert_accepted(tmp_path, range(5))


@pytest.mark.proof
def test_two_hundred_healthy_ones_are_accepted(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    assert_accepted(tmp_path, range(200))
    record_property("healthy checkpoints refused", "0 of 200")
