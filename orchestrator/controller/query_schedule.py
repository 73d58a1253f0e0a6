"""When a controller queries its scheduler: soon after events in files, rarely while nothing changes."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from random import Random

SHORTEST, LONGEST = 1.0, 15.0  # pauses between queries about jobs that are about to start, stop or be judged
AFTER_FAILURE, AFTER_FAILURES = 5.0, 60.0  # first and longest pause after queries without an answer; it doubles
REST, LONGEST_REST = 10.0, 120.0  # pause after an answer, as a multiple of the time that it took, and its maximum
BURST, REFILL = 20.0, 5.0  # number of calls that may follow each other, and seconds after which another is allowed
JITTER = 0.2  # pauses grow by up to this part, so that the controllers of many users do not query at the same time


@dataclass(frozen=True, kw_only=True)
class Signs:
    """State that a controller sees without its scheduler: `events` is any value that changes with an event.

    `unsettled`: a job is about to start, stop or be judged, so that only its scheduler can show what comes next.
    """

    events: Hashable = None
    unsettled: bool = False


class QuerySchedule:
    """Times of one controller's queries to its scheduler.

    `quiet`: shortest pause in seconds, for each call of a query, while nothing changes; 0: every pass queries it.
    """

    def __init__(self, mono: Callable[[], float], rng: Random, *, quiet: float) -> None:
        self._mono, self._rng, self._quiet = mono, rng, quiet
        self._events: Hashable = None
        self._asked: float | None = None  # when the last query ended
        self._unsettled = self._acted = False
        self._pause, self._quiet_pause, self._failure = SHORTEST, quiet, 0.0
        self._rests_until = 0.0
        self._calls_left, self._refilled = BURST, 0.0

    def is_due(self, signs: Signs) -> bool:
        """Return whether to query the scheduler in this pass, given what is visible without it."""
        if signs.events != self._events:
            self._events, self._acted, self._pause = signs.events, True, SHORTEST
        self._unsettled = signs.unsettled
        return self.seconds_left() <= 0.0

    def seconds_left(self) -> float:
        """Return the seconds until the next query, unless the signs change."""
        if self._asked is None or not self._quiet:
            return 0.0
        now = self._mono()
        self._calls_left = min(BURST, self._calls_left + (now - self._refilled) / REFILL)
        self._refilled = now
        refill = REFILL * max(0.0, 1.0 - self._calls_left)
        pause = 0.0 if self._acted else self._pause if self._unsettled else self._quiet_pause
        return max(self._asked + pause - now, self._rests_until - now, refill)

    def note_action(self) -> None:
        """Record that the controller has changed something, so that the next query is due soon."""
        self._acted, self._pause = True, SHORTEST

    def note_query(self, *, took: float, calls: int, answered: bool) -> None:
        """Record a query of the scheduler that has just ended."""
        now = self._mono()
        if self._asked is None:
            self._refilled = now
        self._asked, self._acted = now, False
        self._calls_left -= calls
        self._pause = min(LONGEST, self._pause * 1.5)
        self._quiet_pause = self._add_jitter(self._quiet * calls)
        self._failure = 0.0 if answered else min(AFTER_FAILURES, max(AFTER_FAILURE, 2 * self._failure))
        rest = max(SHORTEST, min(LONGEST_REST, REST * took)) if answered else self._failure
        self._rests_until = now + self._add_jitter(rest)

    def _add_jitter(self, seconds: float) -> float:
        return seconds * (1.0 + JITTER * self._rng.random())
