"""What the coordinator does about a request that somebody put into the run directory, and what it answers."""

from collections.abc import Callable
from typing import Any

from trainer.agent.questions import Questions
from trainer.agent.stopping import Stop, Stopping
from trainer.contract.progress import StopReason
from trainer.contract.requests import Request, RequestKind

_SAVE_SECONDS = 3600.0


class Answers:
    """One method for each kind of request; None instead of an answer says that it will come later."""

    def __init__(
        self, *, command: bool, stopping: Stopping, questions: Questions, ask_stop: Callable[[Stop], None],
        tell: Callable[..., Any], wall: Callable[[], float],
    ) -> None:  # fmt: skip
        """`command`: the ranks are the user's own command; `tell` sends a message to every agent."""
        self._command, self._stopping, self._questions = command, stopping, questions
        self._ask_stop, self._tell, self._wall = ask_stop, tell, wall

    def to(self, request: Request, now: float, saved: int) -> str | None:
        """Do what is asked; `saved` is the newest saved step."""
        if request.kind is RequestKind.STOP:
            self._ask_stop(self._stopping.asked(request.reason, now))
            return "the ranks are told to save and stop"
        if request.kind is RequestKind.DEADLINE and request.value is not None:
            self._stopping.correct(now + request.value - self._wall())
            return f"the job ends in {request.value - self._wall():.0f} s"
        if request.kind is RequestKind.SAVE:
            return self._save(request, saved)
        return f"refused: a {request.kind} request needs a value"

    def _save(self, request: Request, saved: int) -> str | None:
        if self._command:
            return "refused: the ranks are the user's own command, orch cannot ask it to save"
        if self._stopping.stop is not None:
            return "a stop with a save is under way"
        self._tell("ask", reason=int(StopReason.SAVE_AND_GO_ON), seconds=_SAVE_SECONDS)
        self._questions.await_save(request.name, saved)
        return None
