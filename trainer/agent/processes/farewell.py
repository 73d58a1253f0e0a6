"""How a rank ended: by what the kernel says, by its own last words, or by what it left in its log."""

import signal
from dataclasses import asdict
from typing import Any

from trainer.agent.processes.cry import last_cry
from trainer.agent.processes.local_ranks import LocalRank
from trainer.contract.outcome import RankOutcome
from trainer.contract.run_dir import AttemptDir

_KEYS = ("exit_code", "step", "exception", "message", "echo")
_LONGEST = 4000


def of_shell(exit_code: int | None, number: int | None) -> tuple[int | None, int | None]:
    """Exit code and signal, with a shell's way to say that its child was killed taken for what it means."""
    if exit_code is not None and 128 < exit_code <= 128 + signal.SIGRTMAX:
        return None, exit_code - 128
    return exit_code, number


def farewell(
    attempt: AttemptDir, generation: int, local: LocalRank, exit_code: int | None, number: int | None, *, command: bool
) -> dict[str, Any]:
    """All that is known of the end of this rank, as the coordinator wants to hear it.

    `command`: it was a user's own program, which leaves no words that we could read.
    """
    end: dict[str, Any] = {"exit_code": exit_code, "signal": number, "step": local.look().step}
    said = _own_words(attempt, generation, local)
    if said is not None:
        # It had said all when it died: dying in the interpreter's teardown changes nothing.
        end = {**said, "signal": None, "message": (said["message"] or "")[:_LONGEST]}
    elif number == signal.SIGABRT:
        end["message"] = last_cry(attempt.rank_log(local.rank), generation)
    return {**end, "word": said is not None or command, "stepped": local.stepped()}


def _own_words(attempt: AttemptDir, generation: int, local: LocalRank) -> dict[str, Any] | None:
    """How this rank says that it ended: by its outcome file, or by its socket when it could not write that."""
    while local.hear() is not None:
        pass
    try:
        word = asdict(RankOutcome.read(attempt.rank_outcome(local.rank, generation)))
    except (OSError, ValueError, TypeError):
        word = local.word or {}
    return {key: word.get(key) for key in (*_KEYS, "position")} if set(_KEYS) <= word.keys() else None
