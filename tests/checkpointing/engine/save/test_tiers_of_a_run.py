"""A run of one rank with a fast and a slow tier: its end, its retention, and the cleanup at its start."""

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from checkpointing.config import CheckpointConfig, TierConfig
from checkpointing.engine.checkpointer import Checkpointer
from checkpointing.engine.collectives.group import World
from checkpointing.engine.restore.restorer import RestoreOptions
from checkpointing.storage.backends import open_storage
from checkpointing.tiers.catalog import Catalog, DistrustedCheckpoints, Owner
from checkpointing.tiers.tier import RunTiers, resolve_tiers
from tests.checkpointing.engine.conftest import NONCE, blank, loaded, state


@dataclass
class Run:
    """Makes checkpointers of one run, with `keep=2` in the run's own folder and another one behind it."""

    root: Path
    every: int = 0
    reported: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    made: list[Checkpointer] = field(default_factory=list)

    @property
    def fast(self) -> Path:
        return self.root / "checkpoints"

    @property
    def slow(self) -> Path:
        return self.root / "slow" / "my-run"

    def checkpointer(self, suspects: Collection[int] = (), world: World | None = None, **options: Any) -> Checkpointer:
        config = CheckpointConfig(
            tiers=(TierConfig(keep=2), TierConfig(path=str(self.root / "slow"), every=self.every, keep=2))
        )
        owner = {"attempt": 1, "nonce": NONCE, "inherit": (), "fence": lambda: True}
        made = Checkpointer(
            Owner(**{**owner, **options}),
            world or World(),
            RunTiers(resolve_tiers(config, self.fast, "my-run", "node-0"), open_storage(self.fast)),
            lambda kind, data: self.reported.append((kind, data)),
            config=config,
            restore=RestoreOptions(suspects=suspects),
            pauses=(),
        )
        self.made.append(made)
        return made

    def saved(self, checkpointer: Checkpointer, *steps: int) -> None:
        checkpointer.prepare(state(0))
        for step in steps:
            assert checkpointer.save(step, state(step), {})
            checkpointer.wait()
        assert checkpointer.failure is None

    def steps(self, place: Path) -> list[int]:
        return [entry.step for entry in Catalog(place).committed_entries()]


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(**options: Any) -> Run:
        runs.append(Run(tmp_path, **options))
        return runs[-1]

    yield make
    for run in runs:
        for made in run.made:
            made.close()


def test_the_last_checkpoint_reaches_every_tier_before_the_end(make_run: Callable[..., Run]) -> None:
    run = make_run(every=1000)
    made = run.checkpointer()
    run.saved(made, 10, 20, 30)
    made.close(lambda: 20.0)
    assert run.steps(run.slow)[0] == 30
    assert "checkpoint.failed" not in [kind for kind, _ in run.reported]


def test_an_end_without_time_leaves_the_rest_to_the_next_start(make_run: Callable[..., Run]) -> None:
    run = make_run(every=1000)
    made = run.checkpointer()
    run.saved(made, 10, 20)
    made.close()
    again = run.checkpointer()
    again.prepare(blank())
    assert again.restore(blank()) is not None
    again.close(lambda: 20.0)
    assert run.steps(run.slow)[0] == 20


# ---- what is not relied on


def test_a_suspect_is_no_substitute_but_a_new_save_of_its_step_is(make_run: Callable[..., Run]) -> None:
    run = make_run(every=1000)
    first = run.checkpointer()
    run.saved(first, 460, 480, 500)
    first.close()
    again = run.checkpointer(suspects={500})
    again.prepare(blank())
    assert loaded(again.restore(blank())).step == 480
    assert again._flusher.drain(20.0)
    run.saved(again, 500)
    assert run.steps(run.fast) == [500, 500, 480], "beside the suspect two that can be trusted stay"
    run.saved(again, 520)
    assert run.steps(run.fast) == [520, 500, 500], "the one that was saved afterwards is trusted"


def test_a_refused_copy_is_no_substitute_in_its_tier(make_run: Callable[..., Run]) -> None:
    run = make_run(every=1000)
    first = run.checkpointer()
    run.saved(first, 400, 420, 500)
    first.close(lambda: 20.0)
    newest = Catalog(run.fast).committed_entries()[0].name
    (run.fast / newest / "__0_0.distcp").write_bytes(b"x" * (run.fast / newest / "__0_0.distcp").stat().st_size)
    again = run.checkpointer()
    again.prepare(blank())
    restored = loaded(again.restore(blank()))
    assert (restored.step, restored.tier) == (500, str(run.slow))
    distrusted = again._restorer.distrusted
    assert (distrusted.in_tier(str(run.fast)), distrusted.in_tier(str(run.slow))) == ({newest}, frozenset())
    assert again._flusher.drain(20.0)
    run.saved(again, 520)
    assert run.steps(run.fast) == [520, 500, 420], "the damaged one counts for nothing"


def test_a_copy_that_is_bad_in_memory_alone_is_trusted_on_disk() -> None:
    distrusted = DistrustedCheckpoints()
    distrusted.refuse("memory", "some")
    assert (distrusted.in_tier("/fast"), distrusted.in_tier("memory")) == (frozenset(), {"some"})


def test_a_name_that_retention_deleted_is_not_reused(make_run: Callable[..., Run]) -> None:
    """A slower tier or the registry may still have another state under this name."""
    run = make_run(every=1000)
    first = run.checkpointer(world=World(facts={"generation": 1}))
    run.saved(first, 10, 20, 30)
    assert first._flusher.drain(20.0)
    run.saved(first, 40, 50)
    first.close()
    gone = f"step-00000030.001-{NONCE}"
    assert (run.slow / gone).exists()
    assert not (run.fast / gone).exists()
    again = run.checkpointer(world=World(facts={"generation": 3}), suspects={40, 50})
    run.saved(again, 30)
    assert (run.fast / f"{gone}-3" / "COMMIT").exists()


# ---- what a start tidies


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("fresh", [False, True], ids=["restored", "from-nothing"])
def test_debris_is_deleted_at_the_next_start_before_any_save(make_run: Callable[..., Run], fresh: bool) -> None:
    """On a full disk there would be no save after which it could go."""
    run = make_run()
    first = run.checkpointer()
    if not fresh:
        run.saved(first, 10)
    first.close()
    whole = {path.name for path in run.fast.iterdir()} if run.fast.exists() else set()
    own, ended_attempts = f"step-00000020.001-{NONCE}", "step-00000030.001-00000001"
    foreign = "step-00000040.001-99999999"
    for name in (own, ended_attempts, foreign):
        (run.fast / name).mkdir(parents=True)
        (run.fast / name / "__0_0.distcp").write_bytes(b"half")
    again = run.checkpointer(ended_attempts=("1-00000001",))
    again.prepare(blank())
    assert (again.restore(blank()) is None) == fresh
    until(lambda: {path.name for path in run.fast.iterdir()} == {*whole, foreign})
    run.saved(again, 20)
    assert run.steps(run.fast)[0] == 20
