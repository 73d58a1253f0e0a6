"""The ladder within an attempt, on tables: roll back, restart in place, use a spare, leave; always with the reason."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.agent.ladder.test_in_job_policy import bad_step, echo, end, killed, raised, situation
from trainer.agent.attempt_state.attempt_state import GenerationState
from trainer.agent.ladder.attempt_history import AttemptHistory
from trainer.agent.ladder.in_job_policy import decide, exit_code, record_skip
from trainer.agent.ladder.rank_death import find_cause
from trainer.protocol import skipped_batches
from trainer.protocol.events import EventKind, EventLog, read_events
from trainer.protocol.failures.decision import Action, Decision
from trainer.protocol.failures.outcome import ExitCode, Failure, FailureKind
from trainer.protocol.launch_token import LaunchToken
from trainer.protocol.messages.agents import ProgressReport
from trainer.protocol.rank_progress.progress import StopReason
from trainer.protocol.run_dir import RunDir
from trainer.protocol.skipped_batches import Skip

LOST = Failure(kind=FailureKind.AGENT_LOST, reason="the agent of n1 is lost: reset", node="n1")
UNFIT = Failure(kind=FailureKind.NODE_SUSPECT, reason="n1 multiplies at 40 % of its peers", node="n1")
HANG = Failure(kind=FailureKind.HANG, reason="rank 1 on n1 stopped first", rank=1, node="n1", step=7)
NETWORK = Failure(kind=FailureKind.HANG, reason="no rank makes progress between n1 and n2", step=7)
DESYNC = Failure(kind=FailureKind.DESYNC, reason="rank 1 on n1 called another collective", rank=1, node="n1", step=7)
SKIP = Skip(step=7, position=56, reason="loss nan")
OTHER = Skip(step=5, position=32, reason="loss nan")

HANGS = [
    (
        {},
        Action.RESTART,
        "rank 1 on n1 stopped first; restart 1 of 5 in place, with 4 times the `detection.hang.least`",
    ),
    (
        {"broken": NETWORK, "hung": ("n1",)},
        Action.RESTART,
        "no rank makes progress between n1 and n2; restart 1 of 5",
    ),
    ({"hung": ("n2",)}, Action.RESTART, "restart 1 of 5 in place"),
    ({"hung": ("n1",)}, Action.END, "n1 is blamed for a hang for the second time in this attempt"),
    (
        {"hung": ("n1",), "spares": 2},
        Action.REPLACE,
        "second time in this attempt; a spare node takes the place of n1, 1 ",
    ),
    ({"hung": ("n1",), "spares": 2, "home": "n1"}, Action.END, "blamed for a hang for the second time"),
    ({"spares": 2}, Action.RESTART, "restart 1 of 5 in place"),
    ({"restarts": 5}, Action.END, "5 restarts in place used up without a new checkpoint"),
    ({"stopping": StopReason.PREEMPTION}, Action.END, "while stopping (preemption)"),
]


@pytest.mark.parametrize(("fields", "action", "words"), HANGS)
def test_a_hang_is_restarted_once_and_a_node_that_hangs_twice_is_left(fields, action, words):
    decision = decide(situation(**{"broken": HANG, **fields}))
    assert (decision.action, decision.failure.kind) == (action, FailureKind.HANG)
    assert words in decision.reason


def test_after_a_hang_nobody_is_waited_for_and_those_we_kill_are_not_the_cause():
    assert decide(situation(broken=HANG, since_failure=0.0)).action is Action.RESTART
    decision = decide(situation(killed(0, 15, at=-1.0), killed(2), echo(3), broken=HANG))
    assert decision.failure is HANG


def test_a_hang_of_those_who_wait_for_a_dead_peer_does_not_count():
    generation = GenerationState()
    generation.note(killed(1))
    generation.fail(HANG, 2.0)
    assert generation.broken is None
    generation.fail(LOST, 3.0)
    assert generation.broken is LOST
    fresh = GenerationState()
    fresh.note(end(1, exit_code=0))
    fresh.fail(HANG, 2.0)
    assert fresh.broken is HANG


def test_what_a_new_generation_cannot_mend_counts_more_than_what_it_can():
    generation = GenerationState()
    generation.fail(HANG, 1.0)
    generation.fail(UNFIT, 2.0)
    assert generation.broken is UNFIT
    generation.fail(HANG, 3.0)
    generation.fail(DESYNC, 4.0)
    assert generation.broken is UNFIT
    generation.fail(LOST, 5.0)
    assert (generation.broken, generation.first_failure) == (LOST, 1.0)


def test_different_collectives_end_the_attempt():
    decision = decide(situation(broken=DESYNC, since_failure=0.0))
    assert (decision.action, decision.failure, decision.reason) == (Action.END, DESYNC, DESYNC.reason)


SPARES = [
    ({"broken": LOST}, Action.END, "the agent of n1 is lost: reset"),
    ({"broken": LOST, "spares": 1}, Action.REPLACE, "reset; a spare node takes the place of n1, 0 left after it"),
    ({"broken": LOST, "spares": 1, "home": "n1"}, Action.END, "the agent of n1 is lost"),
    ({"broken": LOST, "spares": 1, "stopping": StopReason.CANCEL}, Action.END, "the agent of n1 is lost"),
    ({"broken": UNFIT}, Action.END, "40 % of its peers"),
    ({"broken": UNFIT, "spares": 3}, Action.REPLACE, "peers; a spare node takes the place of n1, 2 left after it"),
    ({"broken": UNFIT, "spares": 3, "restarts": 5}, Action.REPLACE, "2 left after it"),
    (
        {"ends": (end(2, exit_code=77),), "spares": 3},
        Action.REPLACE,
        "suspects its node (exit code 77); a spare node",
    ),
    ({"ends": (end(2, exit_code=77),), "spares": 3, "home": "n2"}, Action.END, "suspects its node"),
    ({"ends": (killed(2),), "spares": 3}, Action.RESTART, "restart 1 of 5 in place"),
]


@pytest.mark.parametrize(("fields", "action", "words"), SPARES)
def test_a_spare_takes_the_place_of_a_lost_or_suspect_node(fields, action, words):
    decision = decide(situation(**fields))
    assert decision.action is action, decision
    assert words in decision.reason


def test_bad_batches_with_high_losses_are_skipped_in_a_row():
    earlier = tuple(Skip(step=7, position=position, reason="loss 9") for position in (32, 40, 48))
    spikes = tuple(replace(bad_step(rank), exception="LossSpike") for rank in range(4))
    found = [decide(situation(*spikes, skipped=earlier[:count], rollbacks=count, spike_budget=3)) for count in range(4)]
    assert [one.action for one in found] == [*[Action.ROLL_BACK] * 3, Action.END]
    assert "3 rollbacks used up without a new checkpoint" in found[-1].reason


BAD = [
    ({}, Action.ROLL_BACK, "rollback 1 of 3, skipping that batch"),
    ({"skipped": (OTHER,), "rollbacks": 1}, Action.ROLL_BACK, "rollback 2 of 3"),
    ({"skipped": (OTHER,), "rollbacks": 3, "advanced": True}, Action.ROLL_BACK, "rollback 1 of 3"),
    ({"restarts": 5}, Action.ROLL_BACK, "rollback 1 of 3"),
    ({"earlier_futile": 9}, Action.ROLL_BACK, "rollback 1 of 3"),
    ({"spike_budget": 0}, Action.END, "no rollbacks allowed"),
    ({"skipped": (OTHER,), "rollbacks": 1, "spike_budget": 1}, Action.END, "1 rollback used up without"),
    (
        {"skipped": (Skip(step=7, position=48, reason=""),)},
        Action.END,
        "step 7 was bad before, and its batch at that time",
    ),
    ({"skipped": (Skip(step=6, position=56, reason=""),)}, Action.END, "that batch should already have been skipped"),
    (
        {"stopping": StopReason.TIME_LIMIT, "left": 90.0},
        Action.ROLL_BACK,
        "while stopping (time limit); rollback 1 of 3",
    ),
    ({"stopping": StopReason.TIME_LIMIT, "left": 90.0, "restarts": 5}, Action.ROLL_BACK, "rollback 1 of 3"),
    ({"stopping": StopReason.TIME_LIMIT, "spike_budget": 0}, Action.END, "no rollbacks allowed"),
    (
        {"stopping": StopReason.TIME_LIMIT, "skipped": (Skip(step=7, position=48, reason=""),)},
        Action.END,
        "while stopping (time limit); step 7 was bad before",
    ),
]


@pytest.mark.parametrize(("fields", "again"), [({"left": 5.0}, False), ({"left": 90.0}, True)])
def test_a_bad_step_without_time_to_save_ends_as_the_stop_does_and_leaves_its_batch_out(fields, again):
    now = situation(bad_step(2), stopping=StopReason.TIME_LIMIT, spike_budget=3, restarted_to_save=again, **fields)
    decision = decide(now)
    assert (decision.action, decision.failure.kind) == (Action.END, FailureKind.TIME_LIMIT)
    assert decision.skip == Skip(step=7, position=56, reason=find_cause(now.ends, trained=True).failure.reason)
    why = "once more after a restart" if again else "with 5 s left, too little to start again"
    assert f"data, {why}" in decision.reason
    assert "that batch is skipped from now on (time limit)" in decision.reason


@pytest.mark.parametrize(("fields", "action", "words"), BAD)
def test_a_bad_step_is_rolled_back_and_its_batch_left_out(fields, action, words):
    decision = decide(situation(bad_step(2), echo(1), **{"spike_budget": 3, **fields}))
    assert decision.action is action, decision
    assert words in decision.reason
    assert decision.reason.startswith("step 7: loss nan, gradient norm 1.0; its batch is at position 56 of the data")
    assert decision.failure.kind is FailureKind.NUMERIC
    assert (decision.failure.rank, decision.failure.node, decision.failure.step) == (None, None, 7)
    if action is Action.ROLL_BACK:
        assert (decision.skip.step, decision.skip.position, decision.suspect) == (7, 56, None)
    else:
        assert decision.skip is None


class Attempt:
    """Generations of one attempt, as the coordinator leads them."""

    def __init__(self, **fields: Any) -> None:
        self.past, self.fields = AttemptHistory(), fields

    def over(self, *ends: Any, restored: int = 100, stepped: int = 0, saved: int = 0, **fields: Any) -> Decision:
        """One generation that trained up to step `stepped`, committed one of step `saved`, and ended so."""
        past = self.past
        past.add_report(
            ProgressReport(
                generation=1, stepped=stepped > restored, step=stepped or restored, restored=restored, saved=saved
            )
        )
        decision = decide(
            situation(
                *ends, restored=restored, history=past,
                **{"budget": 9, "spike_budget": 3, **self.fields, **fields},
            )
        )  # fmt: skip
        drill = str(fields.get("drill", ""))
        failure = replace(decision.failure, drill=drill) if decision.failure else None
        past.record_failure(failure, decision.mark, restored, decision.suspect, decision.skip, requested=bool(drill))
        past.restarts += decision.action is Action.RESTART and not drill
        return decision


def test_two_bad_batches_soon_after_the_same_checkpoint_make_it_suspect():
    attempt = Attempt()
    first = attempt.over(bad_step(0, step=103, position=816), stepped=103)
    assert (first.action, first.suspect) == (Action.ROLL_BACK, None)
    second = attempt.over(bad_step(0, step=105, position=840), stepped=105)
    assert (second.action, second.suspect) == (Action.ROLL_BACK, 100)
    assert "suspect: BadStep twice soon after loading it, at step 103 and at step 105" in second.reason
    assert [skip.position for skip in attempt.past.skipped] == [816, 840]


def test_bad_batches_far_from_the_checkpoint_say_nothing_of_it():
    attempt = Attempt()
    assert attempt.over(bad_step(0, step=150, position=816), stepped=150).suspect is None
    assert attempt.over(bad_step(0, step=160, position=840), stepped=160).suspect is None


def test_the_same_step_bad_again_is_tried_from_an_older_checkpoint_before_it_is_held():
    attempt = Attempt()
    attempt.over(bad_step(0, step=103, position=816), stepped=103)
    second = attempt.over(bad_step(0, step=103, position=824), stepped=103)
    assert (second.action, second.suspect) == (Action.ROLL_BACK, 100)
    third = attempt.over(bad_step(0, step=103, position=832), restored=90, stepped=103)
    assert (third.action, third.failure.kind) == (Action.END, FailureKind.NUMERIC)


def test_without_a_checkpoint_the_same_step_bad_again_is_the_end():
    attempt = Attempt()
    assert attempt.over(bad_step(0), restored=0, stepped=7).action is Action.ROLL_BACK
    second = attempt.over(bad_step(0, position=64), restored=0, stepped=7)
    assert second.action is Action.END
    assert "step 7 was bad before" in second.reason


def test_rollbacks_use_no_restart():
    attempt = Attempt()
    attempt.over(bad_step(0, step=150, position=816), stepped=150)
    assert attempt.past.restarts == 0
    assert "restart 1 of 9" in attempt.over(killed(1), stepped=180).reason


def test_three_restarts_in_a_row_without_a_new_step_are_enough():
    attempt = Attempt()
    assert attempt.over(killed(1, step=105), stepped=105).action is Action.RESTART
    for number, signal in enumerate((9, 7, 4), start=1):
        assert attempt.past.futile_restarts == number
        decision = attempt.over(killed(number, signal, step=105), stepped=105)
        assert (decision.action is Action.END) == (number == 3), decision
    assert "3 restarts in a row have trained no new step" in decision.reason


def test_one_new_step_begins_the_count_anew():
    attempt = Attempt()
    for step in (105, 104, 104, 106, 0, 0):
        assert attempt.over(killed(1), stepped=step, failed_generations=()).action is Action.RESTART
    assert attempt.over(killed(1), failed_generations=()).action is Action.END


def test_of_a_command_no_step_is_known():
    attempt = Attempt(command=True)
    for _ in range(6):
        assert attempt.over(killed(1), restored=0).action is Action.RESTART


def test_a_node_blamed_twice_is_left_even_when_the_ranks_differ():
    attempt = Attempt()
    assert attempt.over(broken=HANG, stepped=120).action is Action.RESTART
    assert attempt.over(raised(1), stepped=140).action is Action.RESTART
    again = Failure(kind=FailureKind.HANG, reason="rank 3 on n1 stopped first", rank=3, node="n1")
    assert attempt.over(broken=again, stepped=160).action is Action.END


def test_drills_that_somebody_requests_use_up_nothing():
    attempt = Attempt(budget=1)
    for _ in range(5):
        decision = attempt.over(killed(1, step=105), stepped=105, drill="kill-rank")
        assert (decision.action, decision.suspect) == (Action.RESTART, None)
        assert decision.reason.endswith("restart in place, not counted: drill kill-rank")
    hung = Failure(kind=FailureKind.HANG, reason="rank 3 on n1 stopped first", rank=3, node="n1")
    for _ in range(2):
        assert attempt.over(broken=hung, stepped=105, drill="stop-rank").action is Action.RESTART
    assert (attempt.past.restarts, attempt.past.futile_restarts, attempt.past.hung) == (0, 0, [])
    assert "restart 1 of 1 in place" in attempt.over(killed(1, step=108), stepped=108).reason


def test_a_drill_forgives_no_failure_before_it():
    attempt = Attempt()
    for _ in range(2):
        attempt.over(killed(1, step=105), stepped=105)
    before = attempt.past.futile_restarts
    attempt.over(killed(1, step=105), stepped=105, drill="kill-rank")
    assert attempt.past.futile_restarts == before > 0


def test_a_drilled_desync_holds_the_run_all_the_same():
    desync = Failure(kind=FailureKind.DESYNC, reason="rank 1 reduced 2 elements, its peers 1", rank=1, node="n1")
    assert Attempt().over(broken=desync, stepped=105, drill="desync-shape").action is Action.END


# -- an exhausted rung is not the cause


def test_a_program_that_saves_between_its_failures_keeps_its_restarts():
    attempt = Attempt(budget=2)
    for step in range(105, 205, 5):
        decision = attempt.over(raised(1, step=step), restored=step - 5, stepped=step, saved=step - 1)
        assert (decision.action, decision.failure.kind) == (Action.RESTART, FailureKind.EXCEPTION), decision
        assert "restart 1 of 2 in place" in decision.reason


def test_only_a_checkpoint_that_is_new_to_the_run_gives_restarts_back():
    attempt = Attempt(budget=2)
    attempt.past = AttemptHistory.from_token(
        LaunchToken(attempt=2, epoch=1, job_id="7", nonce="0badcafe", checkpoints=("step-00000110.001-0badcafe",))
    )
    for number, step in enumerate((105, 111, 112)):
        decision = attempt.over(raised(1, step=step), restored=100, stepped=step, saved=110)
        assert decision.action is (Action.END if number == 2 else Action.RESTART), decision
    assert decision.reason.endswith("; 2 restarts in place used up without a new checkpoint")


def test_an_exception_after_kills_that_used_up_the_restarts_ends_the_attempt_as_what_it_is():
    attempt = Attempt(budget=5)
    for step in range(101, 106):
        assert attempt.over(killed(1, step=step), stepped=step, failed_generations=()).action is Action.RESTART
    decision = attempt.over(raised(1, step=120), stepped=120)
    assert (decision.action, decision.failure.kind) == (Action.END, FailureKind.EXCEPTION)
    assert exit_code(decision.failure) is ExitCode.RETRY


def test_without_restarts_in_place_an_exception_is_for_the_next_job():
    decision = Attempt(budget=0).over(raised(1, step=120), stepped=120)
    assert (decision.action, decision.failure.kind) == (Action.END, FailureKind.EXCEPTION)
    assert decision.reason.endswith("raised ValueError: bad; no restarts in place allowed")


def test_rollbacks_are_given_back_by_a_new_checkpoint():
    attempt = Attempt(spike_budget=1)
    for step in (150, 250, 350):
        bad = bad_step(0, step=step, position=step * 8)
        decision = attempt.over(bad, restored=step - 50, stepped=step, saved=step - 1)
        assert "rollback 1 of 1" in decision.reason
    assert attempt.over(bad_step(0, step=380, position=9), restored=349, stepped=380, saved=349).action is Action.END


def test_a_run_that_trained_before_is_not_at_its_first_step():
    token = LaunchToken(attempt=2, epoch=1, job_id="7", nonce="0badcafe")
    assert not AttemptHistory.from_token(token).trained
    assert AttemptHistory.from_token(replace(token, trained=True)).trained
    assert AttemptHistory.from_token(replace(token, perhaps=("step-00000110.001-0badcafe",))).trained


BAD_BATCH = Skip(step=7, position=56, reason="loss nan")


@pytest.mark.parametrize("works", [True, False])
def test_a_skipped_batch_is_recorded_and_told(
    tmp_path: Path, works: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path / "run-1")
    run.make()
    attempt = run.attempt(1)
    attempt.make()
    path = attempt.event_file("coordinator")

    def refuses(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if not works:
        monkeypatch.setattr(skipped_batches, "add", refuses)
    asyncio.run(record_skip(BAD_BATCH, attempt, EventLog(path, "coordinator", 1)))
    (event,) = read_events(path)[0]
    assert (event.kind, event.data) == (EventKind.BATCH_SKIPPED, {"step": 7, "position": 56, "reason": "loss nan"})
    assert attempt.skipped_batches.exists() == works
    assert ("cannot write" in capsys.readouterr().err) != works
