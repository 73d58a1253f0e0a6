"""A lease for each scheduler instance: who excludes whom, and which runs a holder may write to."""

from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import Fenced, ForeignRun
from orchestrator.registry import fast_queries
from orchestrator.registry.records import Lease
from orchestrator.registry.store import Store
from orchestrator.states import RunState
from tests.fakes.new_runs import create_run, take_lease

A, B = "lab@login1:6817/aaaaaaaa", "lab@login1:6818/bbbbbbbb"


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with Store.open(tmp_path / "registry.db") as opened:
        yield opened


def taken(store: Store, scheduler: str, holder: str = "", now: float = 0.0) -> Lease:
    return take_lease(store, holder or f"holder of {scheduler}", now, 60.0, scheduler)


def submitted(store: Store, tmp_path: Path, scheduler: str) -> str:
    run, attempt = create_run(
        store, tmp_path, {"name": "a"}, slug="a", scheduler=scheduler, now=0.0, nonce=f"{len(store.runs()):08x}"
    )
    assert attempt.scheduler == run.scheduler == scheduler
    return run.name


def test_controllers_of_two_schedulers_live_side_by_side(store: Store, tmp_path: Path) -> None:
    first, second = taken(store, A), taken(store, B)
    assert second.epoch > first.epoch
    assert store.take_lease("rival", 1.0, 60.0, A) is None
    store.drop_lease(first)
    again = taken(store, A, "rival", 1.0)
    assert again.epoch > second.epoch, "an epoch names one lease among all"
    assert store.renew_lease(second, 2.0, 60.0).scheduler == B
    with pytest.raises(Fenced):
        store.renew_lease(first, 2.0, 60.0)
    assert {lease.scheduler for lease in fast_queries.leases(tmp_path / "registry.db")} == {A, B}


def test_the_lease_for_all_runs_excludes_every_other(store: Store) -> None:
    first = taken(store, A)
    assert store.take_lease("everything", 1.0, 60.0) is None
    store.drop_lease(first)
    whole = taken(store, "", "everything", 1.0)
    assert store.take_lease("x", 2.0, 60.0, A) is None
    covers = store.lease(B)
    assert covers is not None
    assert covers.holder == "everything"
    late = taken(store, A, "x", 100.0)
    assert late.epoch > whole.epoch
    with pytest.raises(Fenced):
        store.renew_lease(whole, 101.0, 60.0)


def test_a_controller_never_writes_to_a_run_of_another_scheduler(store: Store, tmp_path: Path) -> None:
    mine, theirs = submitted(store, tmp_path, A), submitted(store, tmp_path, B)
    epoch, ask = taken(store, A).epoch, store.add_user_request(theirs, "cancel", {}, 0.0)
    before = (store.run(theirs), store.attempts(theirs), store.transitions(theirs))
    store.note_run(mine, epoch=epoch, now=1.0, step=1)
    for write in (
        lambda: store.note_run(theirs, epoch=epoch, now=1.0, step=1),
        lambda: store.move_run(theirs, RunState.HELD, "x", epoch=epoch, now=1.0),
        lambda: store.note_attempt(theirs, 1, epoch=epoch, job_id="1"),
        lambda: store.add_attempt(theirs, nonce="ffffffff", excluded=(), epoch=epoch, now=1.0),
        lambda: store.set_cursor(theirs, "f", 1, epoch=epoch),
        lambda: store.answer(ask, "done", epoch=epoch, now=1.0),
    ):
        with pytest.raises(ForeignRun, match=f"{theirs} belongs to {B}"):
            write()
    assert (store.run(theirs), store.attempts(theirs), store.transitions(theirs)) == before
    assert [one.id for one in store.user_requests()] == [ask]


def test_a_run_is_claimed_once_and_its_attempts_follow(store: Store, tmp_path: Path) -> None:
    name = submitted(store, tmp_path, "")
    first, second = taken(store, A), taken(store, B)
    assert store.claim_run(name, A, epoch=first.epoch)
    assert store.claim_run(name, A, epoch=first.epoch), "repeating it is harmless"
    assert not store.claim_run(name, B, epoch=second.epoch)
    assert (store.run(name).scheduler, store.attempts(name)[0].scheduler) == (A, A)
    assert store.claim_run(name, B, epoch=second.epoch, before=A)
    added = store.add_attempt(name, nonce="ffffffff", excluded=(), epoch=second.epoch, now=1.0)
    assert [attempt.scheduler for attempt in store.attempts(name)] == [A, B] == [A, added.scheduler]
