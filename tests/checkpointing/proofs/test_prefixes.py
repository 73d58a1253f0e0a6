"""Every prefix of the engine's storage operations, as a crash or a power loss would leave it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from checkpointing.format.commit import parse_name
from checkpointing.tiers.catalog import Catalog
from checkpointing.verification.verify import verify
from tests.checkpointing.fake_storages import Recording, replay
from tests.checkpointing.proofs.world import World, marked, same, state

KEEP, SAVES = 2, 4


def recorded(place: Path) -> list[tuple[object, ...]]:
    """The operations of some saves, their commits and the deletion of old checkpoints, in order."""
    storage = Recording(place)
    with World(place).checkpointer(storage=storage, keep=KEEP, files=2) as made:
        made.prepare(state(0))
        for step in range(1, SAVES + 1):
            made.save(step, state(step), {})
            made.wait()
    return storage.log


def assert_whole(log: list[tuple[object, ...]], length: int, place: Path, *, power_loss: bool) -> None:
    """A prefix leaves only complete checkpoints: the newest that were committed by then."""
    world = World(place)
    world.root.mkdir()
    replay(log[:length], world.root, power_loss=power_loss)
    published = [str(entry[1]).split("/")[0] for entry in log[:length] if _commits(entry)]
    there = {entry.name for entry in Catalog(world.root).committed_entries()}
    assert set(published[-KEEP:]) <= there, f"after {length} operations"
    for name in there:
        assert verify(world.root / name, 2).ok, f"after {length} operations"
    with world.checkpointer(keep=KEEP) as made:
        target = marked(state(0))
        restored = made.restore(target)
        parts = parse_name(published[-1]) if published else None
        assert (restored.step if restored else None) == (parts.step if parts else None), f"after {length} operations"
        if restored:
            assert same(target, state(restored.step)), f"after {length} operations"
        made.prepare(state(0))
        made.save(SAVES + 1, state(SAVES + 1), {})
        made.wait()
    found = {path.name for path in world.root.iterdir() if path.is_dir()}
    assert found == {entry.name for entry in Catalog(world.root).committed_entries()}, (
        f"debris after {length} operations"
    )


def _commits(entry: tuple[object, ...]) -> bool:
    return entry[0] == "publish" and str(entry[1]).endswith("/COMMIT")


def test_a_sample_of_prefixes(tmp_path: Path) -> None:
    log = recorded(tmp_path / "real")
    assert sum(map(_commits, log)) == SAVES
    assert any(entry[0] == "delete" for entry in log)
    for length in range(0, len(log) + 1, max(1, len(log) // 5)):
        for power_loss in (False, True):
            assert_whole(log, length, tmp_path / f"{length}-{power_loss}", power_loss=power_loss)


@pytest.mark.proof
@pytest.mark.parametrize("power_loss", [False, True], ids=["crash", "power-loss"])
def test_every_prefix(tmp_path: Path, power_loss: bool, record_property: Callable[[str, object], None]) -> None:
    log = recorded(tmp_path / "real")
    for length in range(len(log) + 1):
        assert_whole(log, length, tmp_path / str(length), power_loss=power_loss)
    record_property(f"prefixes replayed after a {'power loss' if power_loss else 'crash'}", len(log) + 1)
