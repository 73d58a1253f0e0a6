from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.registry.records import Attempt, Lease, RestoreTest, Run
from orchestrator.registry.store import Store
from tests.fakes.new_runs import create_run, take_lease


class Desk:
    """A fresh registry with a lease, and short words for what most tests need."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "registry.db"
        self.root = folder / "runs"
        self.root.mkdir()
        self.store = Store.open(self.path)
        lease = take_lease(self.store, "here", 0.0, 1e9)
        self.lease: Lease = lease

    @property
    def stamp(self) -> dict[str, float]:
        return {"epoch": self.lease.epoch, "now": 10.0}

    def run(self, slug: str = "tiny", now: float = 1.0) -> tuple[Run, Attempt]:
        number = len(self.store.runs())
        return create_run(
            self.store,
            self.root,
            {"name": slug},
            slug=slug,
            cluster="local",
            total_steps=100,
            identity={"code": {"sha": "abc"}},
            now=now,
            nonce=f"{number:08x}",
        )

    def test_of(self, run: str, step: int, verdict: str = "", *, ended_at: float = 20.0, layout: str = "same") -> str:
        test = self.run(f"{run}-test")[0].name
        self.store.put_restore_test(
            RestoreTest(test=test, run=run, checkpoint=f"s{step}", layout=layout, step=step, begun_at=10.0)
        )
        if verdict:
            stamp = {"epoch": self.lease.epoch, "now": ended_at}
            self.store.end_restore_test(test, verdict, f"{verdict} at {step}", {}, **stamp)
        return test


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.store.close()
