"""The records of a made-up run, as torch 2.13's flight recorder for NCCL dumps them, and what they can tell at most."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from tests.trainer.agent.flight.mesh_program import Call, Mesh, Style, drawn, programs
from tests.trainer.agent.flight.mesh_run import ALONE, FOR_EVER, WATCHED_EVERY, Fault, Made, Run

_LATE = 1e6
"""Seconds after which the records are asked for: all that can move has moved."""
_BEFORE = 40_000
"""Collectives of every group before those that are simulated."""


@dataclass(frozen=True, kw_only=True)
class Recorder:
    """How the records are kept and asked for."""

    size: int = 2000  # entries of the ring
    timing: bool = True  # TORCH_NCCL_ENABLE_TIMING
    active: bool = False  # only what is not over is dumped
    lost: frozenset[int] = frozenset()  # ranks whose records nobody has, and of which nothing is known


@dataclass(frozen=True, kw_only=True)
class Incident:
    """A job to which something has happened."""

    mesh: Mesh
    style: Style
    faults: tuple[Fault, ...]
    run: Run
    recorder: Recorder
    dumps: dict[int, dict[str, Any]]
    unanswered: tuple[int, ...]
    tellable: dict[int, str]  # culprits that records can tell from the innocent, with the kind of fault
    untellable: dict[int, str]  # those that they cannot

    @property
    def hangs(self) -> bool:
        return any(self.run.pending(rank) for rank in range(self.mesh.world))


def dump(run: Run, rank: int, recorder: Recorder, seen_until: float) -> dict[str, Any]:
    """What the recorder of one rank says; what was over after `seen_until` nobody has seen."""
    own = {name: members for name, members in run.groups.items() if rank in members}
    numbers = {name: number for number, name in enumerate(own)}
    before = {"last_enqueued_collective": _BEFORE, "last_started_collective": -1, "last_completed_collective": _BEFORE}
    status = {number: dict(before) for number in map(str, numbers.values())}
    entries: list[dict[str, Any]] = []
    messages = dict.fromkeys(own, _BEFORE)
    batch, parts = 0, []
    for made in run.ranks[rank].made:
        call = made.call
        if batch and call.batch != batch:
            entries.append(_coalesced(parts))
            parts, batch = [], 0
        if call.peer >= 0 and not (call.batch and call.batch == batch):
            messages[call.group] += 1
        entry = _entry(run, rank, made, numbers[call.group], messages[call.group], recorder, seen_until)
        entries.append(entry)
        told, number = status[str(numbers[call.group])], entry["p2p_seq_id"] or entry["collective_seq_id"]
        told["last_enqueued_collective"] = number
        if made.op.over.get(rank, FOR_EVER) <= seen_until:
            told["last_completed_collective"] = max(told["last_completed_collective"], number)
        if call.batch:
            batch = call.batch
            parts.append((entry, made.op.over.get(rank, FOR_EVER) <= seen_until))
    if parts:
        entries.append(_coalesced(parts))
    for at, entry in enumerate(entries):
        entry["record_id"] = _BEFORE + at
    kept = [one for one in entries[-recorder.size :] if not (recorder.active and one["retired"])]
    return {
        "version": "2.10", "comm_lib_version": "2.27.5", "entries": kept, "nccl_comm_state": {},
        "pg_config": {name.partition(":")[2]: {"name": name.partition(":")[2], "desc": _description(name),
                                               "ranks": str(list(members))} for name, members in own.items()},
        "pg_status": status,
    }  # fmt: skip


def _description(name: str) -> str:
    return "default_pg" if name.startswith("world") else f"{name.partition(':')[0].upper()}_PARALLEL_GROUP"


def _entry(
    run: Run, rank: int, made: Made, local: int, message: int, recorder: Recorder, seen_until: float
) -> dict[str, Any]:
    call, members, over = made.call, run.groups[made.call.group], made.op.over.get(rank, FOR_EVER) <= seen_until
    begun = recorder.timing and made.op.joined.get(rank, FOR_EVER) <= seen_until
    name, number = call.op, _BEFORE + made.sequence
    if call.peer >= 0:
        here, there = members.index(rank), members.index(call.peer)
        name, number = f"{call.op} {here}{'->' if call.op == 'send' else '<-'}{there}", _BEFORE
    # The parts of a batch are never marked: only the entry of the batch is.
    over, begun = over and not call.batch, begun and not call.batch
    return {
        "record_id": 0, "pg_id": local, "process_group": [call.group.partition(":")[2], _description(call.group)],
        "collective_seq_id": number, "p2p_seq_id": message if call.peer >= 0 else 0, "op_id": len(run.ranks[rank].made),
        "profiling_name": f"nccl:{name}", "time_created_ns": int(made.time * 1e9), "is_p2p": call.peer >= 0,
        "input_sizes": [[call.size, 1]], "input_dtypes": ["BFloat16"], "output_sizes": [[call.size, 1]],
        "output_dtypes": ["BFloat16"], "retired": over, "timeout_ms": 600_000,
        "state": "completed" if over else "started" if begun else "scheduled",
        "time_discovered_started_ns": 1 if begun else None,
    }  # fmt: skip


def _coalesced(parts: Sequence[tuple[dict[str, Any], bool]]) -> dict[str, Any]:
    over = all(done for _, done in parts)
    return {**parts[-1][0], "profiling_name": "nccl:coalesced", "retired": over,
            "state": "completed" if over else "scheduled"}  # fmt: skip


def incident(seed: int) -> Incident:
    """Some job, something that happens to it, and some way to record it."""
    random = Random(seed)
    mesh, style = drawn(random)
    code = list(programs(mesh, style))
    whole = Run(mesh, code, (), seed)
    end = max(one.now for one in whole.ranks)
    faults = _faults(random, mesh, code, end)
    run = Run(mesh, code, faults, seed)
    lost = frozenset(random.sample(range(mesh.world), 1)) if random.random() < 0.1 and mesh.world > 2 else frozenset()
    recorder = Recorder(
        size=random.choice((12, 40, 200, 2000)),
        timing=random.random() < 0.5,
        active=random.random() < 0.4 and not style.batched,
        lost=lost,
    )
    if recorder.active:
        recorder = replace(recorder, size=2000)
    seen = dict.fromkeys(range(mesh.world), _LATE)
    for fault in faults:
        if fault.blind:
            seen |= {rank: fault.time - random.random() * WATCHED_EVERY for rank in fault.ranks}
    dead = frozenset(rank for fault in faults if fault.kind == "dead" for rank in fault.ranks)
    dumps = {rank: dump(run, rank, recorder, seen[rank]) for rank in range(mesh.world) if rank not in dead | lost}
    culprits = {rank: fault for fault in faults if fault.kind != "split" for rank in fault.ranks}
    told = {
        rank: _is_tellable(run, code, faults, fault, rank, recorder, seen, dumps, seed)
        for rank, fault in culprits.items()
    }
    return Incident(
        mesh=mesh, style=style, faults=tuple(faults), run=run, recorder=recorder, dumps=dumps,
        unanswered=tuple(sorted(dead)),
        tellable={rank: _kind(culprits[rank]) for rank, is_told in told.items() if is_told},
        untellable={rank: _kind(culprits[rank]) for rank, is_told in told.items() if not is_told},
    )  # fmt: skip


def _kind(fault: Fault) -> str:
    return "gpu error" if fault.blind else fault.kind


def _faults(random: Random, mesh: Mesh, code: Sequence[Sequence[Any]], end: float) -> list[Fault]:
    """One, two or three at about the same time; a split network or another program comes alone."""
    kind = random.choice(("host", "host", "host", "gpu", "gpu error", "gpu error", "dead", "split", "program", "never"))
    if kind == "split":
        cut = random.randrange(1, mesh.world)
        ranks = random.sample(range(mesh.world), cut) if random.random() < 0.3 else range(cut)
        return [Fault(kind="split", ranks=frozenset(ranks), time=end * random.uniform(0.2, 0.8))]
    if kind == "program":
        rank = random.randrange(mesh.world)
        calls = [
            at for at, one in enumerate(code[rank]) if isinstance(one, Call) and one.peer < 0 and one.op != "all_to_all"
        ]
        middle = calls[len(calls) // 4 : len(calls) * 3 // 4] or calls
        what = random.choice(("order", "shape", "skip"))
        return [Fault(kind=what, ranks=frozenset([rank]), at=random.choice(middle))] if middle else []
    count = min(mesh.world - 1, random.choice((1, 1, 1, 2, 2, 3)))
    time = end * random.uniform(0.2, 0.7)
    found = []
    for rank in random.sample(range(mesh.world), count):
        its = kind if random.random() < 0.8 else random.choice(("host", "gpu error", "dead"))
        when = 0.0 if its == "never" else time + random.random() * 5e-4
        found.append(Fault(
            kind={"never": "host", "gpu error": "gpu"}.get(its, its), ranks=frozenset([rank]), time=when,
            blind=its == "gpu error"))  # fmt: skip
    return found


def _is_tellable(
    run: Run, code: Sequence[Sequence[Any]], faults: Sequence[Fault], fault: Fault, rank: int, recorder: Recorder,
    seen: dict[int, float], dumps: dict[int, dict[str, Any]], seed: int,
) -> bool:  # fmt: skip
    """Whether records can tell this culprit from an innocent one, whoever reads them."""
    if fault.kind in ("order", "shape", "skip"):
        return _stands_out(run, rank, dumps)
    there = set(dumps)
    missed = any(
        rank in made.op.members and not _has_called(run, rank, made)
        for other in there - {rank}
        for made in run.pending(other)
    )
    if fault.kind == "dead":
        return any(rank in made.op.members for other in there for made in run.pending(other))
    if rank not in there:
        return False
    if fault.kind == "gpu":
        return _shows(run, rank, recorder, seen, dumps)
    if not missed:
        return False
    # What it waits for would wait without its fault, too: it is a victim of another one, and looks like that.
    pending = {id(made.call) for made in run.pending(rank)}
    if not pending:
        return True
    others = [one for one in faults if one is not fault]
    without = Run(run.mesh, code, others, seed)
    return not pending & {id(made.call) for made in without.pending(rank)}


def _has_called(run: Run, rank: int, made: Made) -> bool:
    return any(one.op is made.op for one in run.ranks[rank].made)


def _stands_out(run: Run, rank: int, dumps: dict[int, dict[str, Any]]) -> bool:
    """Whether most records of a collective that differs are against that of this rank: of two nobody can tell."""
    first = next((made for made in run.ranks[rank].made if made.op.differs), None)
    if first is None or first.call.op == first.op.call.op == "all_to_all":
        return False
    called = [made for made in (_made(run, one, first) for one in dumps) if made is not None]
    alike = Counter((made.call.op, made.call.size) for made in called)
    own = (first.call.op, first.call.size)
    held = all(_holds(dumps[one], first) for one in dumps if _made(run, one, first) is not None)
    return rank in dumps and held and len(alike) == 2 and alike[own] == 1 < max(alike.values())


def _made(run: Run, rank: int, like: Made) -> Made | None:
    return next((made for made in run.ranks[rank].made if made.op is like.op), None)


def _shows(run: Run, rank: int, recorder: Recorder, seen: dict[int, float], dumps: dict[int, dict[str, Any]]) -> bool:
    """Whether a stopped GPU leaves a trace: less is over than can be, or its first open call has not begun.

    In any other case a record looks the same whichever member of the group, or what link between them, stopped.
    """
    open_calls = [made for made in run.ranks[rank].made if made.op.over.get(rank, FOR_EVER) > seen[rank]]
    for other in dumps.keys() - {rank}:
        ahead: dict[str, list[Made]] = {}
        for made in open_calls:
            if made.call.peer < 0 and made.op.over.get(other, FOR_EVER) <= seen[other]:
                ahead.setdefault(made.call.group, []).append(made)
        # Two links that fail at once would be needed to bring about the same: a peer is through the call after.
        for made in (one for calls in ahead.values() for one in calls[1:]):
            if made.call.op not in (*ALONE, "all_to_all") and any(_holds(one, made) for one in dumps.values()):
                return True
    if not open_calls or not recorder.timing or not _holds(dumps[rank], first := open_calls[0]):
        return False
    others = set(first.op.members) & dumps.keys() - {rank}
    begun = {one for one in (rank, *others) if first.op.joined.get(one, FOR_EVER) <= seen[one]}
    return rank not in begun and bool(begun) and dumps[rank]["entries"][0]["retired"]


def _holds(dumped: dict[str, Any], made: Made) -> bool:
    """Whether a record still has a collective."""
    place = (made.call.group.partition(":")[2], _BEFORE + made.sequence)
    return made.call.peer < 0 and any(
        (one["process_group"][0], one["collective_seq_id"]) == place and not one["is_p2p"] for one in dumped["entries"]
    )
