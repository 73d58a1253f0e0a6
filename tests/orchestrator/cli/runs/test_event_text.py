"""Events of checkpoints and of what was noticed, in words."""

from typing import Any

import pytest

from orchestrator.cli.runs.timeline import EventDescriber, describe_event, progress_line
from trainer.protocol.events import Event, EventKind

SAID: list[tuple[EventKind, dict[str, Any], str]] = [
    (EventKind.CHECKPOINT_COMMITTED, {"step": 20, "name": "a", "bytes": 1 << 20, "seconds": 0.52},
     "saved step 20 (1.0 MiB, 0.5 s)"),
    (EventKind.CHECKPOINT_COMMITTED, {"step": 20, "name": "a", "bytes": 1 << 20, "seconds": 0.52, "stall": 0.0123},
     "saved step 20 (1.0 MiB, 0.5 s, training waited 12 ms)"),
    (EventKind.CHECKPOINT_RESTORED, {"step": 20, "name": "a", "seconds": 0.1, "tier": "memory"},
     "resumed from memory, step 20"),
    (EventKind.CHECKPOINT_RESTORED, {"step": 20, "name": "a", "seconds": 0.1, "tier": "/runs/r-1/checkpoints"},
     "resumed from step 20"),
    (EventKind.CHECKPOINT_RESTORED, {"step": 20, "name": "a", "seconds": 0.1}, "resumed from step 20"),
    (EventKind.CHECKPOINT_REFUSED, {"step": 20, "name": "a", "reason": "torn", "tier": "memory"},
     "checkpoint 20 in memory is not used: torn"),
    (EventKind.CHECKPOINT_REFUSED, {"step": 20, "name": "a", "reason": "torn"}, "checkpoint 20 is not used: torn"),
    (EventKind.CHECKPOINT_INCOMPLETE, {"step": 20, "reason": "workload.k is not saved"},
     "checkpoint 20 does not hold everything: workload.k is not saved"),
    (EventKind.CHECKPOINT_SOFTWARE, {"step": 20, "changes": {"torch": ["2.12", "2.13"], "nccl": [None, "2.27"]}},
     "checkpoint 20 was made with other software, numbers may differ: torch 2.12 -> 2.13, nccl None -> 2.27"),
    (EventKind.CHECKPOINT_SOFTWARE, {"step": 20, "changes": {"driver": ["1", "2"]}, "ranks": {"driver": 8}},
     "checkpoint 20 was made with other software, numbers may differ: driver 1 -> 2 (rank 8)"),
    (EventKind.CHECKPOINT_SKIPPED, {"step": 20, "reason": "no free copy"}, "step 20 is not saved: no free copy"),
    (EventKind.CHECKPOINT_RETRIED, {"step": 20, "reason": "disk full"}, "saving step 20 is tried again: disk full"),
    (EventKind.CHECKPOINT_RETRIED,
     {"step": 20, "reason": "rank 0: disk full ([Errno 28] No space left on device: '/r/x'); rank 1: the same"},
     "saving step 20 is tried again: disk full (/r)"),
    (EventKind.CHECKPOINT_FAILED, {"step": 20, "reason": "disk full"}, "saving step 20 failed: disk full"),
    (EventKind.CHECKPOINT_FAILED, {"step": 20, "reason": "it is away", "tier": "/far"},
     "copying step 20 to /far failed: it is away"),
    (EventKind.CHECKPOINT_DOUBTED, {"step": 20, "reason": "loss is nan"},
     "step 20 is saved, but looks wrong: loss is nan"),
    (EventKind.CHECKPOINT_FLUSHED, {"step": 20, "name": "a", "tier": "/far", "bytes": 1 << 20, "seconds": 2.0},
     "copied step 20 to /far (1.0 MiB, 2.0 s)"),
    (EventKind.CHECKPOINT_STUCK, {"step": 20, "reason": "9 bytes to go"},
     "saving step 20 hangs, training goes on: 9 bytes to go"),
    (EventKind.CHECKPOINT_SUSPECT, {"step": 20, "reason": "twice SIGSEGV"},
     "checkpoint 20 is suspect: twice SIGSEGV"),
    (EventKind.CHECKPOINT_CADENCE, {"steps": 1200, "seconds": 600.0, "reason": "a save costs 2 s"},
     "saves every 1200 steps from now on: a save costs 2 s"),
    (EventKind.CHECKPOINT_SEEN, {"step": 20, "name": "a.1f", "path": "/out/a", "bytes": 1 << 20, "new": True},
     "the program has a checkpoint of step 20 (1.0 MiB)"),
    (EventKind.CHECKPOINT_SEEN, {"step": 20, "name": "a.1f", "bytes": 7, "damage": "is damaged: a.pt is empty"},
     "the program has a checkpoint of step 20 (7 B), which is damaged: a.pt is empty"),
    (EventKind.CHECKPOINT_SEEN, {"step": 0, "name": "a.1f.2.anew", "anew": "a.1f", "bytes": 7, "new": True},
     "the program has written anew its checkpoint of step 0 (7 B)"),
    (EventKind.CHECKPOINT_SET_ASIDE, {"step": 20, "name": "a.1f", "path": "/out/.orch-set-aside.20", "reason": "torn"},
     "checkpoint 20 is now /out/.orch-set-aside.20: torn"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "data", "words"), SAID)
def test_what_happened_to_checkpoints_is_told(kind: EventKind, data: dict[str, Any], words: str) -> None:
    event = Event(time=1.0, source="rank-00000", seq=1, kind=kind, attempt=1, generation=2, data=data)
    assert describe_event(event) == f"attempt 1 generation 2: {words}"


def test_training_that_goes_on_differently_is_told() -> None:
    data = {"step": 22, "restored": 20, "reason": "loss of step 22 is 3.5, it was 2.5"}
    event = Event(time=1.0, source="r", seq=1, kind=EventKind.RESTART_DIFFERS, attempt=1, generation=2, data=data)
    assert describe_event(event) == (
        "attempt 1 generation 2: training went on differently from step 20: loss of step 22 is 3.5, it was 2.5 before "
        "the restart. Either it depends on something that no checkpoint has, or it does not repeat"
    )


def test_a_validation_is_told_with_its_numbers() -> None:
    data = {"step": 50, "seconds": 3.21, "metrics": {"val_loss": 2.25, "accuracy": "nan"}}
    event = Event(time=1.0, source="r", seq=1, kind=EventKind.VALIDATED, attempt=1, generation=0, data=data)
    assert describe_event(event) == "attempt 1: validated after step 50: val_loss 2.2500  accuracy nan (3.2 s)"


def test_the_end_of_a_users_own_program_has_a_step_only_where_that_is_known() -> None:
    for step, words in ((None, "ended: all ranks finished"), (60, "ended at step 60: all ranks finished")):
        data = {"step": step, "reason": "all ranks finished", "failure": None}
        event = Event(
            time=1.0, source="coordinator", seq=1, kind=EventKind.GENERATION_ENDED, attempt=1, generation=0, data=data
        )
        assert describe_event(event) == f"attempt 1: {words}"


def test_the_moving_line_shows_what_a_program_says_and_nothing_else() -> None:
    assert progress_line("script-1", "RUNNING", 0, None) == "script-1  RUNNING"
    assert progress_line("script-1", "RUNNING", 60, None, step=12, loss=2.5) == (
        "script-1  RUNNING  step 12/60  loss 2.5000"
    )


def test_every_event_of_a_checkpoint_but_its_beginning_and_its_end_is_told() -> None:
    silent = {EventKind.CHECKPOINT_SAVING, EventKind.CHECKPOINT_DELETED}
    kinds = {kind for kind in EventKind if kind.startswith("checkpoint.")} - silent
    assert {kind for kind, _, _ in SAID} == kinds


NOTICED: list[tuple[EventKind, dict[str, Any], str]] = [
    (EventKind.INCIDENT, {"reason": "rank 3 stopped first", "evidence": "a/b", "withdrawn": False},
     "hung: rank 3 stopped first; evidence in a/b"),
    (EventKind.INCIDENT, {"reason": "rank 3 stopped first", "evidence": "a/b", "withdrawn": True},
     "taken for hung, but it went on: rank 3 stopped first"),
    (EventKind.STRAGGLER, {"rank": 1, "node": "n1", "section": "forward", "ratio": 1.3, "over": False},
     "rank 1 on n1 is slow: forward takes 1.30 x its peers' time"),
    (EventKind.STRAGGLER, {"rank": 1, "node": "n1", "section": "forward", "ratio": 1.0, "over": True},
     "rank 1 on n1 is as fast as its peers again"),
    (EventKind.CODE_CHANGED, {"digest": "ab", "reason": "mine changed since attempt 1", "files": {}},
     "other code trains: mine changed since attempt 1"),
    (EventKind.BATCH_SKIPPED, {"step": 7, "position": 96, "reason": "loss nan"},
     "the batch of step 7 is skipped from now on: loss nan"),
    (EventKind.LOSS_LEVEL, {"step": 7, "reason": "loss 9 is high"},
     "the losses have a new level from step 7 on: loss 9 is high"),
    (EventKind.SPARE_USED, {"node": 2, "name": "n3", "instead": "n2", "reason": "gone"},
     "n3 takes the place of n2: gone"),
    (EventKind.STOP_REQUESTED, {"reason": "an agent got SIGTERM"}, "asked to stop: an agent got SIGTERM"),
    (EventKind.STOP_AGREED, {"step": 7, "reason": "preemption"}, "ranks stop together after step 7"),
    (EventKind.STOP_AGREED, {"step": 7, "reason": "time_limit"},
     "ranks stop together after step 7: the time limit is near"),
    (EventKind.STOP_AGREED, {"step": 7, "reason": "save_and_go_on"},
     "ranks save together after step 7, as somebody asked"),
    (EventKind.DRILL, {"kind": "kill-agent", "rank": None, "node": "n2", "step": 7}, "drill: kill-agent n2 at step 7"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "data", "words"), NOTICED)
def test_what_watchers_notice_is_told(kind: EventKind, data: dict[str, Any], words: str) -> None:
    event = Event(time=1.0, source="coordinator", seq=1, kind=kind, attempt=1, generation=2, data=data)
    assert describe_event(event) == f"attempt 1 generation 2: {words}"


HELD = {"parameters": 4 << 20, "gradients": 4 << 20, "optimizer": 8 << 20}
FIRST: list[tuple[dict[str, Any], str]] = [
    ({"step": 1, "seconds": 2.5}, "trains: step 1 done after 2.5 s"),
    ({"step": 1, "seconds": 2.5, "held": {**HELD, "on_host": []}},
     "trains: step 1 done after 2.5 s; rank 0 holds 4.0 MiB of parameters, 4.0 MiB of gradients, 8.0 MiB of "
     "optimizer state"),
    ({"step": 1, "seconds": 2.5, "held": {**HELD, "on_host": ["optimizer"]}},
     "trains: step 1 done after 2.5 s; rank 0 holds 4.0 MiB of parameters, 4.0 MiB of gradients, 8.0 MiB of "
     "optimizer state (optimizer state in host memory)"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "text"), FIRST)
def test_the_first_step_says_what_a_rank_holds(data: dict[str, Any], text: str) -> None:
    kind = EventKind.GENERATION_FIRST_STEP
    event = Event(time=1.0, source="rank-00000", seq=1, kind=kind, attempt=1, generation=1, data=data)
    assert describe_event(event).endswith(text)


def test_saves_that_fail_for_one_reason_are_told_once_and_counted_when_one_works() -> None:
    describer = EventDescriber()

    def told(kind: EventKind, step: int, reason: str = "", generation: int = 1) -> str | None:
        data = {"step": step, "reason": reason} if reason else {"step": step, "bytes": 1 << 20, "seconds": 0.5}
        event = Event(time=1.0, source="r", seq=1, kind=kind, attempt=1, generation=generation, data=data)
        return describer.describe(event)

    full = "OSError: [Errno 28] No space left on device: '/runs/a/checkpoints/step-{:08}.001-x/0'"
    assert told(EventKind.CHECKPOINT_RETRIED, 20, full.format(20))
    assert told(EventKind.CHECKPOINT_FAILED, 20, full.format(20))
    for step in (40, 60):
        assert told(EventKind.CHECKPOINT_RETRIED, step, full.format(step)) is None
        assert told(EventKind.CHECKPOINT_FAILED, step, full.format(step)) is None
    assert told(EventKind.CHECKPOINT_FAILED, 80, "rank 1 is gone"), "another reason"
    assert told(EventKind.CHECKPOINT_FAILED, 100, full.format(100)) is None
    assert told(EventKind.CHECKPOINT_COMMITTED, 120) == (
        "attempt 1 generation 1: saved step 120 (1.0 MiB, 0.5 s), after 3 more failures"
    )
    assert told(EventKind.CHECKPOINT_FAILED, 140, full.format(140)), "it works, and fails anew"
    assert told(EventKind.CHECKPOINT_COMMITTED, 160) == "attempt 1 generation 1: saved step 160 (1.0 MiB, 0.5 s)"
