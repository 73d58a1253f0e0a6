"""Decisions within an attempt, on tables: cause first, then what to do about it."""

import dataclasses
import json
import signal
from typing import Any

import pytest

from trainer.agent.ladder.attempt_history import AttemptHistory
from trainer.agent.ladder.command_failures import CommandPast, NewestCheckpoint
from trainer.agent.ladder.in_job_policy import LONGEST_REASON, Situation, decide, exit_code, final_outcome
from trainer.agent.ladder.rank_death import find_cause
from trainer.protocol.failures.decision import Action, Decision
from trainer.protocol.failures.outcome import AttemptResult, Culprit, ExitCode, Failure, FailureKind
from trainer.protocol.failures.rank_end import RankEnd
from trainer.protocol.rank_progress.progress import StopReason


def end(rank: int, **fields: Any) -> RankEnd:
    return RankEnd(**{"rank": rank, "node": f"n{rank}", "at": float(rank), "step": 7, **fields})


def killed(rank: int, number: int = signal.SIGKILL, **fields: Any) -> RankEnd:
    return end(rank, signal=int(number), **fields)


def raised(rank: int, what: str = "ValueError", message: str = "bad", **fields: Any) -> RankEnd:
    return end(rank, exit_code=1, exception=what, message=message, **fields)


def echo(rank: int, **fields: Any) -> RankEnd:
    return end(rank, exit_code=75, exception="DistBackendError", message="reset by peer", secondary=True, **fields)


def situation(*ends: RankEnd, **fields: Any) -> Situation:
    """Fields of `AttemptHistory` override those of `history`."""
    past = {one.name: fields.pop(one.name) for one in dataclasses.fields(AttemptHistory) if one.name in fields}
    history = dataclasses.replace(fields.pop("history", AttemptHistory(trained=True)), **past)
    return Situation(**{"world": 4, "ends": ends, "since_failure": 9.0, "history": history, "budget": 5, **fields})


def bad_step(rank: int, step: int = 7, position: int = 56, **fields: Any) -> RankEnd:
    message = f"step {step}: loss nan, gradient norm 1.0; its batch is at position {position} of the data"
    return raised(rank, "BadStep", message, step=step, position=position, **fields)


GLOO = (
    "[enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 24 vs 8. Received data size doesn't match expected "
    "size. Is there a distributed collective mismatch in your code?"
)

OTHER = (
    "step 7: the data from rank 1 does not belong to this step: Is there a distributed collective mismatch in your "
    "code?"
)

CAUSES = [
    ([echo(0), killed(2)], FailureKind.RANK_KILLED, 2, True, "was killed by SIGKILL"),
    ([raised(1), killed(2)], FailureKind.EXCEPTION, 1, True, "raised ValueError: bad"),
    ([killed(1, signal.SIGABRT), raised(3)], FailureKind.EXCEPTION, 3, True, "raised ValueError"),
    ([killed(1, signal.SIGABRT), echo(0)], FailureKind.RANK_KILLED, 1, True, "SIGABRT"),
    ([end(0, exit_code=1), killed(3)], FailureKind.RANK_KILLED, 3, True, "SIGKILL"),
    ([echo(3), echo(1)], FailureKind.UNKNOWN, 1, True, "lost the connection to a peer"),
    ([end(0, exit_code=0), end(1, exit_code=78)], FailureKind.USER_ERROR, 1, False, "never to be retried"),
    ([end(1, exit_code=77)], FailureKind.NODE_SUSPECT, 1, False, "suspects its node"),
    ([end(1, exit_code=75)], FailureKind.UNKNOWN, 1, True, "asked to be restarted"),
    ([end(1, exit_code=74)], FailureKind.STORAGE, 1, False, "its storage (exit code 74)"),
    ([raised(1, "OSError", "[Errno 28] No space left on device")], FailureKind.STORAGE, 1, False, "its storage"),
    ([raised(1, "RuntimeError", "[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")],
     FailureKind.STORAGE, 1, False, "its storage"),
    ([raised(1, "SaveFailed", "the last checkpoint was not saved")], FailureKind.STORAGE, 1, False, "its checkpoints"),
    ([raised(1, "NothingVerifies", "2 refused")], FailureKind.STORAGE, 1, False, "its checkpoints"),
    ([raised(1, "UnreadableNow", "step-3")], FailureKind.STORAGE, 1, False, "its checkpoints"),
    ([raised(1, "NothingFits", "x has shape 3 in it, 4 here")], FailureKind.USER_ERROR, 1, False, "a different model"),
    (
        [raised(1, "UnsavableState", "KeyError: 'x' on disk full")],
        FailureKind.USER_ERROR, 1, False, "cannot save its state",
    ),
    ([raised(1, "OSError", "[Errno 122] Disk quota exceeded")], FailureKind.STORAGE, 1, False, "its storage"),
    ([raised(1, "OSError", "[Errno 5] Input/output error")], FailureKind.STORAGE, 1, False, "its storage"),
    ([raised(1, "OSError", "[Errno 27] File too large")], FailureKind.STORAGE, 1, False, "its storage"),
    ([killed(1, signal.SIGXFSZ)], FailureKind.STORAGE, 1, False, "the file size limit (SIGXFSZ; ulimit -f)"),
    ([raised(1, "RuntimeError", "[enforce fail at device.cc:84] ifa != nullptr. Unable to find address for: eth9")],
     FailureKind.INSTALLATION, 1, False, "cannot use GLOO_SOCKET_IFNAME from its environment"),
    ([raised(1, "RuntimeError", "Invalid value for environment variable: TORCH_NCCL_TRACE_BUFFER_SIZE")],
     FailureKind.INSTALLATION, 1, False, "`~env.TORCH_NCCL_TRACE_BUFFER_SIZE` removes it from"),
    ([raised(1, "OSError", "[Errno 55] else")], FailureKind.EXCEPTION, 1, True, "raised OSError"),
    ([raised(1, "DistStoreError", "2/4 clients joined")], FailureKind.UNKNOWN, 1, True, "could not connect to its"),
    ([killed(1, 40)], FailureKind.RANK_KILLED, 1, True, "signal 40"),
    ([end(2)], FailureKind.EXCEPTION, 2, True, "exit code None"),
    ([end(1, exit_code=0, reported=False)], FailureKind.EXCEPTION, 1, True, "exited 0 without reporting completion"),
    ([end(1, exit_code=76, reported=False), killed(2)], FailureKind.RANK_KILLED, 2, True, "SIGKILL"),
    ([raised(1, "BadStep", "step 7: loss nan")], FailureKind.EXCEPTION, 1, True, "raised BadStep"),  # without a place
    ([echo(0), killed(1, signal.SIGABRT, message=GLOO, at=5.0)], FailureKind.DESYNC, 1, False, "ran a different"),
    ([end(0, exit_code=1), killed(1, signal.SIGABRT, message=GLOO)], FailureKind.DESYNC, 1, False, "ran a different"),
    ([raised(3, "RuntimeError", f"x {GLOO}")], FailureKind.DESYNC, 3, False, "a different collective than its peers"),
    ([raised(0, "OtherCollective", OTHER), killed(1, signal.SIGABRT, message=GLOO, at=5.0)],
     FailureKind.DESYNC, 1, False, "ran a different collective"),
    ([raised(0, "OtherCollective", OTHER), raised(2, "OtherCollective", OTHER)], FailureKind.DESYNC, 0, False, "ran"),
    ([raised(0, "OtherCollective", OTHER), killed(1)], FailureKind.RANK_KILLED, 1, True, "SIGKILL"),
    ([killed(1, signal.SIGABRT, message="double free")], FailureKind.RANK_KILLED, 1, True, "SIGABRT"),
]  # fmt: skip


@pytest.mark.parametrize(("ends", "kind", "rank", "retry", "words"), CAUSES)
def test_the_cause_is_the_earliest_end_that_is_no_echo(ends, kind, rank, retry, words):
    cause = find_cause(ends, trained=True)
    assert (cause.failure.kind, cause.failure.rank, cause.retry) == (kind, rank, retry)
    assert words in cause.failure.reason
    assert cause.failure.node == f"n{rank}"


def test_an_exception_before_the_first_step_is_final():
    cause = find_cause([raised(1, step=0)], trained=False)
    assert not cause.retry
    assert cause.failure.reason == "rank 1 on n1 raised ValueError: bad, before the first step"


MISSING = (
    "No module named 'torch.utils.serialization'; part of the installation is missing (environment /venv, orch in /)"
)


def test_an_installation_that_is_made_anew_is_waited_for_in_a_new_job():
    gone = raised(1, "ModuleNotFoundError", MISSING, step=0)
    cause = find_cause([gone], trained=True)
    assert (cause.failure.kind, cause.retry) == (FailureKind.STORAGE, False)
    assert cause.failure.reason.startswith("rank 1 on n1 could not read its installation: ModuleNotFoundError: No mod")
    assert decide(situation(gone, trained=True)).action is Action.END
    assert find_cause([gone], trained=False).failure.kind is FailureKind.USER_ERROR


NO_THREADS = [
    ("RuntimeError", "can't start new thread"),
    ("RuntimeError", "Resource temporarily unavailable"),
    ("BlockingIOError", "[Errno 11] Resource temporarily unavailable"),
    ("RuntimeError", "pthread_create() has failed for thread 3 of 8"),
]


@pytest.mark.parametrize(("what", "message"), NO_THREADS)
@pytest.mark.parametrize("trained", [False, True])
def test_a_node_that_starts_no_thread_is_waited_for_and_counted_before_the_first_step_too(what, message, trained):
    cause = find_cause([raised(1, what, message, step=0)], trained=trained)
    assert (cause.failure.kind, cause.retry, cause.outside) == (FailureKind.UNKNOWN, True, True)
    assert cause.failure.reason.startswith(f"rank 1 on n1 hit a limit of its node: {what}: {message}")
    assert "`ulimit -u` and pids.max" in cause.failure.reason
    again = find_cause([raised(1, what, message, step=0)], trained=trained, last_mark=cause.mark)
    assert again.retry
    decision = decide(situation(raised(1, what, message, step=0), trained=trained, backoff=(30.0, 600.0)))
    assert (decision.action, decision.pause) == (Action.RESTART, 30.0)


def test_what_code_raises_about_itself_is_no_limit_of_a_node():
    cause = find_cause([raised(1, "ValueError", "bad word: can't start new thread", step=0)], trained=False)
    assert (cause.failure.kind, cause.retry) == (FailureKind.USER_ERROR, False)


def test_a_rank_killed_before_the_first_step_is_tried_again():
    assert find_cause([killed(1)], trained=False).retry


def test_the_same_exception_at_the_same_step_is_final_and_another_is_not():
    first = find_cause([raised(1)], trained=True)
    assert not find_cause([raised(2)], trained=True, last_mark=first.mark).retry
    assert find_cause([raised(2, step=8)], trained=True, last_mark=first.mark).retry
    assert find_cause([raised(2, "KeyError")], trained=True, last_mark=first.mark).retry
    same_kill = find_cause([killed(1)], trained=True)
    assert find_cause([killed(1)], trained=True, last_mark=same_kill.mark).retry


def test_a_long_message_is_cut():
    reason = find_cause([raised(1, message="word " * 500)], trained=True).failure.reason
    assert len(reason) < 400
    assert reason.endswith("...")


AGENT_LOST = Failure(kind=FailureKind.AGENT_LOST, reason="the agent of n1 is lost: reset", node="n1")
HUNG = Failure(kind=FailureKind.HANG, reason="rank 1 on n1 hangs", rank=1, node="n1")
NURSERY = Failure(kind=FailureKind.RANK_KILLED, reason="the fork server of n1 died: SIGKILL", node="n1")
ZERO, SAVED = {"exit_code": 0}, {"exit_code": 76}
ALL_DONE = tuple(end(rank, **ZERO) for rank in range(4))
ALL_SAVED = tuple(end(rank, **SAVED) for rank in range(4))
TERM = StopReason.PREEMPTION

DECISIONS = [
    (situation(), Action.WAIT, "0 of 4 ranks have ended"),
    (situation(end(0, **ZERO)), Action.WAIT, "1 of 4"),
    (situation(*ALL_DONE), Action.FINISH, "all ranks finished"),
    (
        situation(*ALL_DONE, saves_failing="copies to /far failing since step 3: away"),
        Action.FINISH,
        "all ranks finished; copies to /far failing since step 3: away",
    ),
    (
        situation(*ALL_DONE[1:], end(0, exit_code=0, reported=False)),
        Action.RESTART,
        "rank 0 on n0 exited 0 without reporting completion",
    ),
    (situation(*ALL_SAVED, stopping=TERM), Action.STOP, "all ranks stopped: preemption"),
    (situation(*ALL_DONE, stopping=TERM), Action.FINISH, "all ranks finished"),
    (situation(*ALL_DONE, stopping=TERM, command=CommandPast()), Action.STOP, "all ranks stopped"),
    (situation(*ALL_DONE, command=CommandPast(), since_end=0.9), Action.WAIT, "waiting for reports of a signal"),
    (situation(*ALL_DONE, command=CommandPast(), since_end=1.0), Action.FINISH, "all ranks finished"),
    (
        situation(*ALL_DONE, command=CommandPast(), since_end=1.0, shortfall="step 40 of 100"),
        Action.END,
        "all ranks ended with exit code 0 at step 40 of 100",
    ),
    (situation(*ALL_DONE, since_end=0.0), Action.FINISH, "all ranks finished"),
    (situation(broken=HUNG, since_failure=0.0), Action.RESTART, "rank 1 on n1 hangs; restart 1 of 5 in place"),
    (
        situation(broken=HUNG, restarts=5, earlier_futile=2),
        Action.END,
        "5 restarts in place used up without a new",
    ),
    (situation(killed(1), earlier_futile=3), Action.END, "3 restarts in a row have trained no new step"),
    (
        situation(killed(1), earlier_futile=3, command=CommandPast()),
        Action.RESTART,
        "restart 1 of 5 in place",
    ),
    (situation(killed(1), budget=0), Action.END, "SIGKILL; no restarts in place allowed"),
    (
        situation(killed(1), budget=1, restarts=1),
        Action.END,
        "; 1 restart in place used up without a new checkpoint",
    ),
    (situation(end(1, exit_code=75), drill="kill-rank"), Action.RESTART, "not counted: drill kill-rank"),
    (situation(end(1, exit_code=78), drill="kill-rank"), Action.END, "never to be retried"),
    (situation(killed(1), since_failure=0.1), Action.WAIT, "waiting for the reports of its peers"),
    (situation(killed(1), since_failure=0.3), Action.RESTART, "restart 1 of 5 in place"),
    (situation(echo(1), since_failure=0.9), Action.WAIT, "waiting for the reports of its peers"),
    (situation(echo(1), since_failure=1.1), Action.RESTART, "lost the connection to a peer"),
    (
        situation(killed(1), echo(0), echo(2), echo(3), since_failure=0.0),
        Action.RESTART,
        "rank 1 on n1 was killed",
    ),
    (situation(killed(1), restarts=5), Action.END, "5 restarts in place used up without a new checkpoint"),
    (situation(raised(1), trained=False), Action.END, "before the first step"),
    (situation(end(1, exit_code=1), trained=False, command=CommandPast()), Action.RESTART, "exit code 1"),
    (situation(end(1, exit_code=77)), Action.END, "suspects its node"),
    (situation(raised(1, "OSError", "[Errno 28] full")), Action.END, "storage"),
    (situation(broken=AGENT_LOST, since_failure=0.0), Action.END, "the agent of n1 is lost"),
    (situation(broken=NURSERY), Action.RESTART, "the fork server of n1 died: SIGKILL; restart 1 of 5"),
    (situation(killed(1), broken=NURSERY), Action.RESTART, "the fork server of n1 died"),
    (situation(stopping=TERM, overdue=False), Action.WAIT, "0 of 4"),
    (situation(stopping=TERM, overdue=True), Action.END, "did not do so in time, and were killed (preemption)"),
    (
        situation(stopping=TERM, overdue=True, saves_failing="saves failing since step 3: disk full (/r)"),
        Action.END,
        "and were killed: saves failing since step 3: disk full (/r)",
    ),
    (
        situation(killed(1), stopping=TERM),
        Action.END,
        "while stopping (preemption), with 0 s left, too little to start",
    ),
    (situation(killed(1), stopping=TERM, left=29.0), Action.END, "with 29 s left, too little"),
    (
        situation(killed(1), stopping=TERM, left=30.0),
        Action.RESTART,
        "30 s are left to start again, save and stop",
    ),
    (
        situation(killed(1), stopping=TERM, left=90.0, since_failure=0.1),
        Action.WAIT,
        "waiting for the reports of its peers",
    ),
    (situation(broken=HUNG, stopping=TERM, left=45.0, since_failure=0.0), Action.RESTART, "45 s are left"),
    (situation(broken=NURSERY, stopping=TERM, left=45.0), Action.RESTART, "45 s are left to start again"),
    (
        situation(killed(1), stopping=TERM, left=90.0, restarted_to_save=True),
        Action.END,
        "once more after a restart for the save",
    ),
    (
        situation(killed(1), stopping=TERM, left=90.0, restarts=5),
        Action.END,
        "with 5 restarts in place used up without",
    ),
    (situation(killed(1), stopping=TERM, left=90.0, restarts=5, advanced=True), Action.RESTART, "90 s are left"),
    (
        situation(raised(1), stopping=TERM, left=90.0),
        Action.RESTART,
        "bad, while stopping (preemption); 90 s are left to",
    ),
    (situation(raised(1), stopping=TERM), Action.END, "bad, while stopping (preemption), with 0 s left"),
    (situation(end(1, exit_code=78), stopping=TERM, left=90.0), Action.END, "never to be retried"),
    (situation(broken=AGENT_LOST, stopping=TERM, left=90.0), Action.END, "the agent of n1 is lost"),
    (situation(killed(1, 15), stopping=TERM, command=CommandPast(), left=90.0), Action.WAIT, "was asked to stop"),
    (situation(killed(1, 15), stopping=TERM, command=CommandPast()), Action.WAIT, "was asked to stop"),
    (
        situation(*(killed(r, 15) for r in range(4)), stopping=TERM, command=CommandPast()),
        Action.STOP,
        "ended when asked",
    ),
    (
        situation(killed(1, 15), stopping=TERM, command=CommandPast(), overdue=True),
        Action.END,
        "did not end in time",
    ),
    (
        situation(stopping=TERM, command=CommandPast(), overdue=True),
        Action.END,
        "the command was asked to stop, did not",
    ),
]


@pytest.mark.parametrize(("now", "action", "words"), DECISIONS)
def test_decisions_and_their_reasons(now, action, words):
    decision = decide(now)
    assert decision.action is action, decision
    assert words in decision.reason
    assert (decision.failure is not None) == (action in (Action.RESTART, Action.END))


def test_a_stop_that_failed_keeps_why_it_was_asked_for():
    kinds = {
        StopReason.CANCEL: FailureKind.CANCELLED,
        StopReason.PREEMPTION: FailureKind.PREEMPTED,
        StopReason.TIME_LIMIT: FailureKind.TIME_LIMIT,
    }
    for stopping, kind in kinds.items():
        failure = decide(situation(stopping=stopping, overdue=True)).failure
        assert failure.kind is kind


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (FailureKind.USER_ERROR, ExitCode.NEVER_RETRY),
        (FailureKind.EXCEPTION, ExitCode.RETRY),
        (FailureKind.DESYNC, ExitCode.NEVER_RETRY),
        (FailureKind.NUMERIC, ExitCode.NEVER_RETRY),
        (FailureKind.HANG, ExitCode.RETRY),
        (FailureKind.NODE_SUSPECT, ExitCode.NODE_SUSPECT),
        (FailureKind.STORAGE, ExitCode.STORAGE),
        (FailureKind.AGENT_LOST, ExitCode.RETRY),
    ],
)
def test_exit_codes_of_failures(kind, code):
    assert exit_code(Failure(kind=kind, reason="")) is code


@pytest.mark.parametrize(
    ("earlier", "damage", "pause"), [(0, "", 10.0), (1, "", 20.0), (2, "", 40.0), (9, "", 90.0), (0, "is empty", 0.0)]
)
def test_a_checkpoint_that_a_command_could_not_load_is_read_again_after_a_pause(
    earlier: int, damage: str, pause: float
) -> None:
    newest = NewestCheckpoint(identity="c-6.1f", name="c-6", damage=damage)
    past = CommandPast(newest=newest)
    row: tuple[Any, ...] = ()
    for number in range(earlier + 1):
        past = CommandPast(newest=newest, failures=row)
        now = situation(raised(1, f"Error{'abcdefghij'[number]}"), command=past, budget=99, backoff=(10.0, 90.0))
        decision = decide(now)
        row = (*row, decision.own)
    assert (decision.action, decision.pause) == (Action.RESTART, pause)
    assert decision.reason.endswith(f"in place, in {pause:.0f} s" if pause else "in place")


@pytest.mark.parametrize("drill", ["", "kill-rank"])
def test_a_drill_moves_no_checkpoint_away(drill: str) -> None:
    newest = NewestCheckpoint(identity="c-6.1f", name="c-6", damage="is empty")
    past = CommandPast(newest=newest, older="c-5", aside=("c-7",))
    decision = decide(situation(raised(1), command=past, drill=drill))
    assert (decision.set_aside == "", "moved away" in decision.reason) == (bool(drill), not drill)
    assert (decision.own is None) == bool(drill)


@pytest.mark.parametrize(("seconds", "action"), [(59.0, Action.END), (60.0, Action.RESTART)])
def test_the_same_exception_at_the_same_step_is_final_only_soon_after_the_restart(
    seconds: float, action: Action
) -> None:
    mark = find_cause([raised(1)], trained=True).mark
    assert decide(situation(raised(1), mark=mark, ran_for=seconds)).action is action


def test_how_an_attempt_ends() -> None:
    done = Decision(action=Action.FINISH, reason="all ranks finished")
    assert final_outcome(done, "x") == (ExitCode.FINISHED, AttemptResult.FINISHED, "all ranks finished")
    stopped = Decision(action=Action.STOP, reason="all ranks stopped")
    assert final_outcome(stopped, "SIGTERM") == (ExitCode.STOPPED_AFTER_SAVE, AttemptResult.STOPPED, "SIGTERM")
    assert final_outcome(stopped, "")[2] == "the ranks themselves"
    for length in (LONGEST_REASON, LONGEST_REASON + 1):
        ended = Decision(action=Action.END, reason="r" * length, failure=HUNG)
        code, result, reason = final_outcome(ended, "")
        assert (code, result) == (ExitCode.RETRY, AttemptResult.FAILED)
        assert len(reason) == LONGEST_REASON
        assert reason.endswith("...") == (length > LONGEST_REASON)


def test_what_is_not_known_of_a_situation_changes_no_decision() -> None:
    now = Situation(world=2)
    assert (now.since_failure, now.since_end, now.ran_for, now.left, now.backoff) == (0.0, 60.0, 0.0, 0.0, (0.0, 0.0))
    past = now.history
    counted = (
        past.restarts,
        now.budget,
        now.restored,
        now.spares,
        now.spike_budget,
        past.rollbacks,
        past.futile_restarts,
    )
    assert counted == (0,) * 7
    assert [past.trained, now.overdue, past.restarted_to_save, past.advanced] == [False] * 4
    assert decide(now).pause == 0.0


# -- several roots of one hang

TWO = (
    Culprit(rank=1, node="n1", kind="stuck_in_data", reason="it stands in data"),
    Culprit(rank=3, node="n3", kind="lock_held", reason="it stands in forward"),
)
BOTH_HUNG = Failure(kind=FailureKind.HANG, reason="2 ranks stopped", rank=1, node="n1", culprits=TWO)


@pytest.mark.parametrize(
    ("more", "action", "lost"),
    [
        ({}, Action.RESTART, ()),
        ({"hung": ("n1", "n3"), "spares": 2}, Action.REPLACE, ("n1", "n3")),
        ({"hung": ("n3",), "spares": 2}, Action.REPLACE, ("n3",)),  # once is an accident
        ({"hung": ("n1", "n3"), "spares": 1}, Action.END, ()),
        ({"hung": ("n1", "n3"), "spares": 2, "home": "n3"}, Action.END, ()),
    ],
)
def test_the_nodes_of_several_roots_are_replaced_together_or_left_together(more, action, lost) -> None:
    decision = decide(situation(broken=BOTH_HUNG, since_failure=2.0, **more))
    assert (decision.action, decision.lost) == (action, lost)
    assert decision.failure == BOTH_HUNG


def test_a_failure_with_several_roots_is_read_back_whole() -> None:
    assert BOTH_HUNG.nodes == ("n1", "n3")
    assert Failure.from_json(json.loads(json.dumps(BOTH_HUNG.to_json()))) == BOTH_HUNG
    assert Failure.from_json({"kind": "hang", "reason": "of an older version"}).culprits == ()


DNS = ("ConnectionError", "Failed to resolve 'hub' ([Errno -2] Name or service not known)")
HTTP = ("HTTPError", "503 Server Error: Service Unavailable for url: https://hub/api")


@pytest.mark.parametrize("outage", [DNS, HTTP])
def test_an_outage_never_counts_as_a_bug_that_came_back(outage: tuple[str, str]) -> None:
    one = raised(0, *outage, step=0)
    mark = find_cause([one], trained=True).mark
    again = {"mark": mark, "ran_for": 0.3, "backoff": (10.0, 25.0), "restored": 20}
    for restarts, pause in enumerate([10.0, 20.0, 25.0]):
        decision = decide(situation(one, world=1, restarts=restarts, **again))
        assert (decision.action, decision.pause) == (Action.RESTART, pause)
        assert decision.failure.kind is FailureKind.UNKNOWN
        assert decision.suspect is None


def test_an_outage_before_the_run_has_ever_trained_may_be_a_wrong_name() -> None:
    decision = decide(situation(raised(0, *DNS, step=0), world=1, trained=False))
    assert decision.action is Action.END
    assert decision.failure.kind is FailureKind.USER_ERROR


def test_before_the_first_step_two_errors_of_one_class_are_not_the_same() -> None:
    first = find_cause([raised(0, message="cannot open shard 3", step=0)], trained=True)
    other = find_cause([raised(0, message="no tokenizer", step=0)], trained=True, last_mark=first.mark)
    alike = find_cause([raised(0, message="cannot open shard 4", step=0)], trained=True, last_mark=first.mark)
    assert (other.retry, alike.retry) == (True, False)


def test_an_unusable_loss_of_a_program_restarts_it_once_per_step():
    lost = Failure(kind=FailureKind.NUMERIC, reason="the loss has been NaN since step 40", step=40)
    first = decide(situation(command=CommandPast(), broken=lost))
    assert (first.action, first.skip) == (Action.RESTART, None)
    assert first.reason == "the loss has been NaN since step 40; restart 1 of 5 in place"
    history = AttemptHistory()
    history.record_failure(lost, "broken", 0, None)
    again = decide(situation(command=CommandPast(), broken=lost, history=history))
    assert (again.action, again.known_failure.kind) == (Action.END, FailureKind.NUMERIC)
    assert again.reason.endswith("; it was unusable from step 40 on before the restart")
    later = dataclasses.replace(lost, step=900)
    assert decide(situation(command=CommandPast(), broken=later, history=history)).action is Action.RESTART
