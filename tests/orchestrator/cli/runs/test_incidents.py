"""`orch show`: incidents with their evidence and what was done, stragglers, batches left out, spares."""

from typing import Any

from orchestrator.registry.records import Generation, Notice
from tests.orchestrator.cli.conftest import Seeds, Type
from trainer.protocol.events import EventKind
from trainer.protocol.run_dir import RunDir


def notice(seeds: Seeds, run: str, what: EventKind, /, generation: int = 1, **data: Any) -> None:
    seq = len(seeds.store.notices(run)) + 1
    seeds.store.put_notice(
        Notice(
            run=run, attempt=1, source="coordinator", seq=seq, kind=what, generation=generation, time=100.0 + seq,
            node=str(data.get("node") or ""), data=data,
        ),
        epoch=seeds.epoch,
    )  # fmt: skip


def hang(seeds: Seeds, run: str, **more: Any) -> None:
    fields = {
        "name": "g001-stopped", "kind": "stopped", "rank": 3, "node": "n2", "phase": "forward", "step": 60,
        "reason": "rank 3 on n2 stopped first", "waiting": [0, 1, 2], "detected": 3.1,
        "evidence": "attempts/001/evidence/g001-stopped",
    }  # fmt: skip
    notice(seeds, run, EventKind.INCIDENT, **{**fields, **more})


def test_an_incident_is_listed_with_its_evidence_and_what_was_done(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    hang(seeds, run)
    reason = "rank 3 on n2 stopped first; restart 1 of 5 in place"
    seeds.store.put_generation(
        Generation(run=run, attempt=1, number=1, started_at=100.0, ended_at=110.0, reason=reason), epoch=seeds.epoch
    )
    (found,) = orch("show", run, "--json").data["incidents"]
    bundle = RunDir(seeds.root / run).attempt(1).incident("g001-stopped")
    assert found == {
        "time": "1970-01-01T00:01:41.000Z", "attempt": 1, "generation": 1, "name": "g001-stopped", "kind": "stopped",
        "rank": 3, "node": "n2", "phase": "forward", "step": 60, "reason": "rank 3 on n2 stopped first",
        "waiting": [0, 1, 2], "detected": 3.1, "withdrawn": False, "evidence": str(bundle), "evidence_there": False,
        "done": reason,
    }  # fmt: skip
    assert "attempts/001/evidence/g001-stopped (gone)" in orch("show", run).out
    bundle.mkdir(parents=True)
    shown = orch("show", run).out
    assert "(gone)" not in shown
    assert "restart 1 of 5 in place" in shown
    assert orch("show", run, "--json").data["incidents"][0]["evidence_there"] is True


def test_an_incident_that_went_on_by_itself_is_said_so(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    hang(seeds, run, withdrawn=True)
    (found,) = orch("show", run, "--json").data["incidents"]
    assert (found["withdrawn"], found["done"]) == (True, "nothing: it went on by itself")


def test_stragglers_batches_spares_and_unfit_nodes_have_their_tables(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    notice(
        seeds, run, EventKind.STRAGGLER, rank=1, node="n1", section="forward", ratio=1.31, step=40, steps=20,
        gpu_hours=0.5, over=False,
    )  # fmt: skip
    notice(seeds, run, EventKind.BATCH_SKIPPED, step=7, position=96, reason="loss nan")
    notice(seeds, run, EventKind.SPARE_USED, node=2, name="n3", instead="n2", reason="its agent is gone")
    notice(seeds, run, EventKind.PREFLIGHT, node=1, name="gpu7", ok=False, reason="/dev/shm is full")
    notice(seeds, run, EventKind.PREFLIGHT, name="gpu8", ok=False, reason="slow", speeds={})
    data = orch("show", run, "--json").data
    assert [(one["rank"], one["ratio"], one["over"]) for one in data["stragglers"]] == [(1, 1.31, False)]
    assert [(one["step"], one["position"]) for one in data["skipped"]] == [(7, 96)]
    assert [(one["name"], one["instead"]) for one in data["spares"]] == [("n3", "n2")]
    assert [(one["node"], one["reason"]) for one in data["unfit"]] == [("gpu7", "/dev/shm is full"), ("gpu8", "slow")]
    shown = orch("show", run).out
    for words in (
        "stragglers\n",
        "1.31 x",
        "batches left out\n",
        "loss nan",
        "spare nodes used\n",
        "/dev/shm is full",
        "gpu7",
    ):
        assert words in shown


def test_other_code_is_named_with_the_digest_of_what_trained(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    notice(seeds, run, EventKind.CODE_RECORDED, digest="ab" * 32)
    notice(seeds, run, EventKind.CODE_CHANGED, digest="cd" * 32, reason="mine changed since the submit", files={})
    notice(seeds, run, EventKind.CODE_CHANGED, digest="", reason="package timm 1.0 -> 2.0 since attempt 1", files={})
    (found, _) = orch("show", run, "--json").data["code_changes"]
    assert (found["attempt"], found["reason"]) == (1, "mine changed since the submit")
    shown = orch("show", run).out
    assert "files cdcdcdcdcdcd (attempt 1)" in shown
    assert "mine changed since the submit" in shown
    assert "package timm 1.0 -> 2.0 since attempt 1" in shown


def test_what_a_restart_did_not_bring_back_has_its_tables(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    differs = "loss of step 8 is 2.0, was 1.0"
    notice(seeds, run, EventKind.RESTART_DIFFERS, step=8, restored=7, reason=differs)
    notice(seeds, run, EventKind.CHECKPOINT_INCOMPLETE, step=7, reason="workload.k had changed and is not saved")
    data = orch("show", run, "--json").data
    assert [(one["step"], one["restored"], one["reason"]) for one in data["restart_differs"]] == [(8, 7, differs)]
    assert [one["step"] for one in data["incomplete"]] == [7]
    shown = orch("show", run).out
    for words in ("restarts that trained differently\n", differs, "state that checkpoints lack\n", "workload.k had"):
        assert words in shown


def test_a_quiet_run_lists_nothing(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    data = orch("show", run, "--json").data
    assert [data[key] for key in ("incidents", "stragglers", "skipped", "spares", "unfit")] == [[]] * 5
    assert "incidents" not in orch("show", run).out
