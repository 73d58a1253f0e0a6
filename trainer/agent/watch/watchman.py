"""The coordinator's watch over one generation: sees that nobody moves, has it looked into, keeps the evidence.

Nothing here decides: `hangs.judge` does, and what comes of a verdict is for `rungs.decide`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.agent.fleet.roster import Roster
from trainer.agent.flight.analysis import Finding, analyse
from trainer.agent.flight.record import Flight
from trainer.agent.watch.hangs import Judgement, Verdict, judge
from trainer.agent.watch.limits import HALTED, Limits
from trainer.agent.watch.sampling import report_seconds
from trainer.agent.watch.scene import Scene
from trainer.agent.watch.sighting import Sighting
from trainer.agent.watch.silences import LONGEST, Silences
from trainer.contract.watching import HangConfig

QUIET = 1.0
"""Seconds without any movement before anybody thinks about it: most steps are shorter."""
_ANSWER_SECONDS, _NODES_A_SECOND = 2.0, 300.0
"""How long agents may take to fetch their ranks' flight records, and how many of them are heard in a second."""
_ASK_AGAIN = 4.0
"""Seconds between two inquiries; `hangs.FRESH` says how old an answer may be."""
_LOCKED = 3.0
"""Seconds without Python's lock that are no accident."""
_HEALTHY = 2
_WHOLE = 16
"""Culprits of whom everything is kept."""


@dataclass(kw_only=True)
class _Inquiry:
    """Flight records that were asked for at `asked`; `waits`: nodes that have not answered."""

    serial: int
    asked: float
    seconds: float  # for which the answers are waited for
    waits: set[int]
    flights: dict[int, Flight] = field(default_factory=dict)
    unanswered: set[int] = field(default_factory=set)
    finding: Finding | None = None

    def over(self, now: float) -> bool:
        return not self.waits or now - self.asked >= self.seconds


@dataclass(frozen=True, kw_only=True)
class Incident:
    """What was found: evidence is being collected until `until`, from the nodes in `waits`."""

    name: str
    judgement: Judgement
    began: float  # when it was declared, on the coordinator's clock
    quiet: float  # for how long nobody had moved by then
    until: float
    waits: set[int]
    missing: dict[str, Any] = field(default_factory=dict)


class Watchman:
    """One generation's watch; all times are on the coordinator's monotonic clock."""

    def __init__(
        self, config: HangConfig, roster: Roster, generation: int, started: float, *, world: int, seen: bool = True,
        on_gpus: bool = False,
    ) -> None:  # fmt: skip
        """`seen` is False for ranks of which no step is known: nothing is judged then."""
        self._config, self._roster, self._generation = config, roster, generation
        self._on, self._on_gpus = config.on and seen, on_gpus
        self.scene = Scene(started, world)
        self._inquiry: _Inquiry | None = None
        self._serial = self._incidents = 0
        self._silences = Silences(max(LONGEST, 3 * report_seconds(len(roster.members))))
        self._halted: dict[int, float] = {}  # since when a rank's process has been seen halted
        self.incident: Incident | None = None

    # -- what is heard

    def heard(self, node: int, report: Mapping[str, Any], now: float) -> None:
        """An agent's report; raises TypeError or ValueError when its rows are none."""
        self._silences.heard(self._roster.members[node].name, now)
        self.scene.heard(report, self._roster.members[node].name, now)

    def answered(self, node: int, message: Mapping[str, Any]) -> None:
        """An agent's answer to `flight`."""
        inquiry = self._inquiry
        if inquiry is None or message["serial"] != inquiry.serial:
            return
        for text in message["flights"]:
            flight = Flight.from_json(text)
            inquiry.flights[flight.rank] = flight
        inquiry.unanswered.update(int(rank) for rank in message["unanswered"])
        if message["last"]:
            inquiry.waits.discard(node)

    def collected(self, node: int, message: Mapping[str, Any]) -> None:
        """An agent has written its part of the evidence, as far as it could."""
        if self.incident is not None and message["incident"] == self.incident.name:
            self.incident.waits.discard(node)
            if message.get("missing"):
                self.incident.missing[self._roster.members[node].name] = message["missing"]

    # -- what is done about it

    def look(self, now: float) -> Incident | None:
        """Judge, and do what the judgement asks for; an Incident once its evidence is there or late."""
        if self.incident is not None:
            return self.incident if not self.incident.waits or now >= self.incident.until else None
        if not self._on or now - self.scene.moved < QUIET or not len(self.scene):
            return None
        seen = self.scene.at(now)
        judgement = self._judge(seen, now)
        if judgement.verdict is Verdict.LOOK:
            self._ask(now)
        elif judgement.verdict is Verdict.HUNG:
            self._declare(judgement, seen, now)
        return None

    def moved_since(self, incident: Incident) -> bool:
        """Whether some rank moved after the incident was declared: then it was none."""
        return self.scene.moved > incident.began

    def withdraw(self) -> None:
        """It moves again: nothing is killed, and the watch goes on."""
        self.incident = self._inquiry = None

    def _judge(self, seen: list[Sighting], now: float) -> Judgement:
        limits = Limits(self._config, self.scene.p99())
        locked = frozenset(one.rank for one in seen if one.lock > _LOCKED and one.state not in "TtDZX")
        self._halted = {rank: since for rank, since in self._halted.items() if since > self.scene.moved}
        for one in seen:
            if one.state in HALTED and not one.ended:
                self._halted.setdefault(one.rank, now)
            else:
                self._halted.pop(one.rank, None)
        inquiry = self._inquiry
        return judge(
            seen,
            self._finding(seen, now),
            limits,
            lock_held=locked,
            found=now - inquiry.asked if inquiry is not None else 0.0,
            halted_for={rank: now - since for rank, since in self._halted.items()},
            silences=self._silences.at(now),
            on_gpus=self._on_gpus,
        )

    def _finding(self, seen: list[Sighting], now: float) -> Finding | None:
        inquiry = self._inquiry
        if inquiry is None or not inquiry.over(now) or inquiry.asked < self.scene.moved:
            return None
        if inquiry.finding is None:
            inquiry.finding = self._analysed(inquiry, seen)
        return inquiry.finding

    @staticmethod
    def _analysed(inquiry: _Inquiry, seen: list[Sighting]) -> Finding:
        # Whose node has not answered would look like one that never came.
        if inquiry.waits:
            return Finding(kind="none", reason=f"{len(inquiry.waits)} nodes have not told their ranks' flight records")
        expected = [one.rank for one in seen if not one.ended]
        return analyse(list(inquiry.flights.values()), expected, sorted(inquiry.unanswered))

    def _ask(self, now: float) -> None:
        inquiry = self._inquiry
        if inquiry is not None and now - inquiry.asked < _ASK_AGAIN:
            return
        self._serial += 1
        waits = {member.node for member in self._roster.seated()}
        seconds = max(_ANSWER_SECONDS, len(waits) / _NODES_A_SECOND)
        self._inquiry = _Inquiry(serial=self._serial, asked=now, seconds=seconds, waits=waits)
        self._roster.tell("flight", generation=self._generation, serial=self._serial, seconds=_ANSWER_SECONDS * 0.75)

    def _declare(self, judgement: Judgement, seen: list[Sighting], now: float) -> None:
        self._incidents += 1
        # A name of its own: what a withdrawn one has left, or still writes, is not this one's.
        again = f"-{self._incidents}" if self._incidents > 1 else ""
        name = f"g{self._generation:03d}-{judgement.kind}{again}"
        waits = {member.node for member in self._roster.seated()}
        self.incident = Incident(
            name=name, judgement=judgement, began=now, quiet=now - self.scene.moved,
            until=now + self._config.evidence, waits=waits,
        )  # fmt: skip
        named = dict.fromkeys([judgement.culprit, *(one.rank for one in judgement.culprits[:_WHOLE])])
        full = [rank for rank in (*named, *_some(judgement, seen)) if rank is not None]
        self._roster.tell(
            "evidence", generation=self._generation, incident=name, full=full, seconds=self._config.evidence * 0.9
        )


def _some(judgement: Judgement, seen: list[Sighting]) -> list[int]:
    """A few waiting ranks to compare with, of another node than the culprit's where there is one."""
    wanted = set(judgement.waiting)
    waiting = [one for one in seen if one.rank in wanted]
    waiting.sort(key=lambda one: one.node == judgement.node)
    return [one.rank for one in waiting[:_HEALTHY]]
