"""Faults in real jobs of two nodes with two ranks each, and what was said of them: a confusion matrix's cases."""

import random
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.trainer.agent.job import LocalJob, until
from trainer.protocol.events import EventKind
from trainer.protocol.logs.line_file import work_lines

WORLD = 4
PER_NODE = 2
PATIENCE = 240.0
"""Seconds: limits grow with what the phases of a run take, and on a busy machine they take long."""

HANGS = {
    "stop-rank": "stopped",
    "hang-in-data": "stuck_in_data",
    "hang-in-forward": "stuck_in_compute",
    "hang-in-save": "stuck_in_save",
    "hang-in-collective": "stuck_in_compute",
    "hang-in-send": "stuck_in_compute",
    "skip-send": "stuck_in_compute",
    "hold-lock": "lock_held",
    "desync-order": "desync",
    "desync-shape": "desync",
}
"""Drills that end in an incident, and the kind that it should have."""

BETWEEN_STAGES = ("hang-in-send", "skip-send")
"""Those of a pipeline."""
KINDS = (*(kind for kind in HANGS if kind not in BETWEEN_STAGES), "kill-rank", "slow-node", "network-cut")


@dataclass(frozen=True, kw_only=True)
class Told:
    """What was brought about, what was said of it, and how long that took (seconds after the fault)."""

    kind: str
    culprit: str  # "rank 3" or "node 1"
    named: str
    taken_for: str
    reason: str

    @property
    def culprit_right(self) -> bool:
        return self.named == self.culprit

    @property
    def kind_right(self) -> bool:
        return self.taken_for == HANGS.get(self.kind, self.kind)


Make = Callable[..., LocalJob]


def play(kind: str, seed: int, make: Make) -> Told:
    """Bring one fault about in a job of its own; `make` starts with the training configuration."""
    rng = random.Random(f"{kind} {seed}")
    rank, step = rng.randrange(WORLD), rng.randrange(6, 14)
    if kind == "network-cut":
        return _cut(make)
    if kind == "slow-node":
        return _slow(rng.randrange(2), make)
    # A save is where a save hangs: every fourth step.
    event = {"kind": kind, "rank": rank, "step": 8 if kind == "hang-in-save" else step}
    work = make(drill={"events": [event]}).start()
    work.go()
    found = until(lambda: _first_word(work), PATIENCE, work.story)
    work.close()
    return Told(kind=kind, culprit=f"rank {rank}", **found)


def _first_word(work: LocalJob) -> dict[str, str] | None:
    """What the first generation's end says."""
    for event in work.events(EventKind.INCIDENT):
        return {"named": f"rank {event.data['rank']}", "taken_for": event.data["kind"], "reason": event.data["reason"]}
    for event in work.events(EventKind.GENERATION_ENDED):
        failure = event.data["failure"] or {"rank": None, "kind": "none"}
        kind = "kill-rank" if failure["kind"] == "rank_killed" else failure["kind"]
        return {"named": f"rank {failure['rank']}", "taken_for": kind, "reason": event.data["reason"]}
    return None


def _slow(node: int, make: Make) -> Told:
    """Both ranks of a node work longer in every step; both are to be named, and nobody else.

    Of three nodes: of two equal halves nobody knows which is the slow one.
    """
    ranks = {node * PER_NODE, node * PER_NODE + 1}
    events = [{"kind": "slow-rank", "rank": rank, "step": 10, "value": 0.15} for rank in ranks]
    train = {"steps": 400, "batch_size": 12}
    work = make(nodes=3, train=train, drill={"events": events}).start()
    work.go()

    def named() -> set[int] | None:
        said = {event.data["rank"] for event in work.events(EventKind.STRAGGLER)}
        return said if len(said) >= len(ranks) else None

    found = until(named, PATIENCE, work.story)
    reason = "; ".join(event.data["reason"] for event in work.events(EventKind.STRAGGLER))
    work.close()
    nodes = {rank // PER_NODE for rank in found}
    right = f"node {nodes.pop()}" if len(nodes) == 1 else f"ranks {sorted(found)}"
    return Told(kind="slow-node", culprit=f"node {node}", named=right, taken_for="slow-node", reason=reason)


def _cut(make: Make) -> Told:
    """The link between the nodes' network namespaces goes down: nothing arrives, and nothing is refused."""
    with namespaces() as (spaces, interface):
        work = make(cluster={"interface": interface}).start(within=[["ip", "netns", "exec", space] for space in spaces])
        work.go()
        until(lambda: _steps(work) >= 5, PATIENCE, work.story)
        subprocess.run(["ip", "-n", spaces[1], "link", "set", interface, "down"], check=True)
        (ended,) = until(lambda: work.events(EventKind.GENERATION_ENDED)[:1], PATIENCE, work.story)
        work.close()
    failure = ended.data["failure"]
    known = {"agent_lost": "network-cut", "hang": "network-cut"}
    named = "node 1" if failure["node"] == "local-1" else f"{failure['node']}"
    return Told(
        kind="network-cut", culprit="node 1", named=named, taken_for=known.get(failure["kind"], failure["kind"]),
        reason=failure["reason"],
    )  # fmt: skip


def _steps(work: LocalJob) -> int:
    """Of the slowest rank."""
    trained = Counter(line["rank"] for line in work_lines(work.attempt))
    return min(trained[rank] for rank in range(WORLD))


@contextmanager
def namespaces() -> Iterator[tuple[list[str], str]]:
    """Two network namespaces with one link between them, and the name that it has in both."""
    tag = f"{random.SystemRandom().randrange(1 << 24):06x}"
    spaces, interface = [f"orch-{tag}-{side}" for side in "ab"], "orchlink"
    ends = [f"o{tag}{side}" for side in "ab"]
    try:
        for space in spaces:
            _ip("netns", "add", space)
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for place, (space, end) in enumerate(zip(spaces, ends, strict=True)):
            _ip("link", "set", end, "netns", space)
            _ip("-n", space, "link", "set", end, "name", interface)
            _ip("-n", space, "addr", "add", f"10.231.77.{place + 1}/24", "dev", interface)
            _ip("-n", space, "link", "set", interface, "up")
            _ip("-n", space, "link", "set", "lo", "up")
        yield spaces, interface
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def matrix(told: list[Told]) -> str:
    """Rows: what was brought about; columns: what it was taken for."""
    seen = sorted({one.taken_for for one in told})
    rows = {kind: [sum(one.kind == kind and one.taken_for == name for one in told) for name in seen] for kind in KINDS}
    lines = [" ".join([f"{'':20}", *(f"{name:>16}" for name in seen)])]
    lines += [" ".join([f"{kind:20}", *(f"{count or '.':>16}" for count in row)]) for kind, row in rows.items()]
    return "\n".join(lines)
