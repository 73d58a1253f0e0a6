"""Which checkpoints are doubted, on tables, and what the coordinator does about it."""

import pytest

from tests.trainer.agent.ladder.test_in_job_policy import end, killed, raised
from tests.trainer.agent.ladder.test_ladder import Attempt
from trainer.agent.ladder.attempt_history import AttemptHistory
from trainer.protocol.failures.decision import Action
from trainer.protocol.failures.outcome import Failure, FailureKind
from trainer.protocol.failures.suspect_checkpoints import WITHIN, FailedGeneration, failed_generation, suspect_steps
from trainer.protocol.messages.agents import ProgressReport

RAISED = "NonFinite"


def fell(restored: int, step: int, mark: str = RAISED, message: str = "") -> FailedGeneration:
    return FailedGeneration(restored=restored, step=step, mark=mark, message=message)


@pytest.mark.parametrize(
    ("failed_generations", "doubted"),
    [
        ([], []),
        ([fell(100, 103)], []),
        ([fell(100, 103), fell(100, 103)], [100]),
        ([fell(100, 103, message="nan"), fell(100, 105, message="nan")], [100]),
        ([fell(100, 103, message="nan"), fell(100, 103, message="inf")], [100]),
        ([fell(100, 103, message="no label"), fell(100, 105, message="no image")], []),  # two failures
        ([fell(100, 103, message="a"), fell(100, 105, message="b"), fell(100, 107, message="a")], [100]),
        ([fell(100, 103), fell(100, 100 + WITHIN)], [100]),
        ([fell(100, 103), fell(100, 101 + WITHIN)], []),  # it went on well for a while
        ([fell(100, 103), fell(100, 150), fell(100, 103)], []),  # in between it did
        ([fell(100, 103), fell(90, 95), fell(100, 103)], [100]),
        ([fell(100, 103), fell(90, 95)], []),
        ([fell(100, 103), fell(100, 103, "rank_killed by SIGKILL")], []),
        ([fell(90, 95), fell(100, 103), fell(90, 95), fell(100, 103)], [90, 100]),
    ],
)
def test_the_same_failure_twice_soon_after_loading_the_same_checkpoint(failed_generations, doubted):
    found = suspect_steps(failed_generations)
    assert list(found) == doubted
    assert all(reason.startswith(f"{RAISED} twice soon after loading it, at step ") for reason in found.values())
    assert suspect_steps(failed_generations, known=doubted) == {}


@pytest.mark.parametrize("kind", list(FailureKind))
def test_only_failures_that_a_state_can_cause_count(kind):
    found = failed_generation(Failure(kind=kind, reason="?", step=103, exit_code=1), 100, None)
    assert (found is not None) == (kind in (FailureKind.RANK_KILLED, FailureKind.EXCEPTION, FailureKind.NUMERIC))


@pytest.mark.parametrize("restored", [None, 0])
def test_a_generation_from_scratch_has_no_checkpoint_to_doubt(restored):
    assert failed_generation(Failure(kind=FailureKind.RANK_KILLED, reason="?", step=3), restored, 3) is None


@pytest.mark.parametrize(("step", "last"), [(0, 126), (100, 126), (None, 100), (None, None)])
def test_a_failure_before_the_first_step_says_nothing_of_the_checkpoint(step, last):
    failure = Failure(kind=FailureKind.EXCEPTION, reason="?", exception="KeyError", step=step)
    assert failed_generation(failure, 100, last) is None


@pytest.mark.parametrize(
    ("exception", "counts"), [("FileNotFoundError", False), ("OSError", False), ("KeyError", True)]
)
def test_an_error_of_the_operating_system_says_nothing_of_the_checkpoint(exception: str, counts: bool) -> None:
    failure = Failure(kind=FailureKind.EXCEPTION, reason="?", exception=exception, step=103)
    assert (failed_generation(failure, 100, 103) is not None) == counts


def test_numbers_and_addresses_in_a_message_make_no_other_failure():
    one, other, third = (
        failed_generation(
            Failure(kind=FailureKind.EXCEPTION, reason="?", exception="E", step=101, message=said), 100, 0
        )
        for said in ("bad at 0x7f and 3", "bad at 0x8e and 44", "bad at all")
    )
    assert one == other != third


def test_different_signals_and_exceptions_are_different_failures():
    kinds = [
        Failure(kind=FailureKind.RANK_KILLED, reason="?", signal=9),
        Failure(kind=FailureKind.RANK_KILLED, reason="?", signal=11),
        Failure(kind=FailureKind.EXCEPTION, reason="?", exception="NonFinite"),
        Failure(kind=FailureKind.EXCEPTION, reason="?", exception="ValueError"),
        Failure(kind=FailureKind.EXCEPTION, reason="?", exit_code=3),
    ]
    marks = [found.mark for kind in kinds if (found := failed_generation(kind, 100, 101))]
    assert len(set(marks)) == 5
    assert "rank_killed by SIGSEGV" in marks


def test_an_older_checkpoint_is_tried_before_a_program_is_blamed():
    attempt, explodes = Attempt(), raised(1, "NonFinite", step=103)
    assert attempt.over(explodes, restored=100).suspect is None
    second = attempt.over(explodes, restored=100)
    assert (second.action, second.suspect, attempt.past.suspects) == (Action.RESTART, 100, [100])
    assert "the checkpoint of step 100 is suspect: NonFinite twice soon after loading it" in second.reason
    # From the older one it comes back at the same step: then it is the program.
    third = attempt.over(explodes, restored=90)
    assert (third.action, third.suspect) == (Action.END, None)
    assert "for the second time at step 103" in third.reason


def test_a_failure_at_the_same_step_from_different_checkpoints_is_the_programs():
    attempt, explodes = Attempt(), raised(1, "NonFinite", step=103)
    attempt.over(explodes, restored=90)
    assert attempt.over(explodes, restored=100).action is Action.END


def test_a_suspect_that_is_all_there_is_ends_as_before():
    attempt, explodes = Attempt(), raised(1, "NonFinite", step=103)
    attempt.over(explodes, restored=100)
    assert attempt.over(explodes, restored=100).suspect == 100
    again = attempt.over(explodes, restored=100)  # nothing older was there, so that it was loaded once more
    assert (again.action, again.suspect) == (Action.END, None)


def test_an_exception_before_the_first_step_is_the_programs():
    attempt = Attempt()
    for number in (1, 2):
        decision = attempt.over(raised(1, "KeyError", step=100), restored=100)
        assert (decision.action is Action.END, decision.suspect) == (number == 2, None)
    assert decision.failure.kind is FailureKind.USER_ERROR
    assert "for the second time at step 100" in decision.reason


def test_different_errors_before_the_first_step_are_tried_again():
    attempt = Attempt()
    for message in ("no server", "no data"):
        ended = end(1, step=100, exit_code=1, exception="RuntimeError", message=message)
        assert attempt.over(ended, restored=100).action is Action.RESTART


def test_different_errors_of_one_class_leave_the_checkpoint_alone():
    attempt = Attempt()
    for step, message in ((103, "sample 17 has no label"), (107, "cannot decode image")):
        decision = attempt.over(end(1, step=step, exit_code=1, exception="E", message=message), restored=100)
        assert (decision.action, decision.suspect) == (Action.RESTART, None)


def test_a_rank_that_dies_twice_after_loading_the_same_checkpoint():
    attempt = Attempt()
    attempt.over(killed(2, 11, step=101), restored=100)
    second = attempt.over(killed(1, 11, step=102), restored=100)
    assert (second.action, second.suspect) == (Action.RESTART, 100)
    assert attempt.over(killed(1, 11, step=101), restored=90).suspect is None


def test_who_asks_never_to_be_retried_is_not():
    attempt = Attempt()
    for _ in range(2):
        decision = attempt.over(end(1, step=103, exit_code=78, exception="Fatal", message="no"), restored=100)
        assert decision.action is Action.END


def test_a_step_that_was_saved_anew_is_doubted_no_longer():
    past = AttemptHistory(failed_generations=[fell(100, 103), fell(90, 95), fell(100, 103)], suspects=[100])
    past.add_report(ProgressReport(generation=1, restored=100, saved=100))  # the doubted one, as the last there was
    past.add_report(ProgressReport(generation=2, restored=90, saved=90))
    past.add_report(ProgressReport(generation=3))
    assert past.suspects == [100]
    past.add_report(ProgressReport(generation=3, restored=90, saved=100))
    assert past.suspects == []
    assert past.failed_generations == [fell(90, 95)]


def test_a_fork_server_that_dies_says_nothing_of_the_checkpoint():
    assert (
        failed_generation(
            Failure(kind=FailureKind.RANK_KILLED, reason="the fork server of n1 died", step=103), 100, 103
        )
        is None
    )
