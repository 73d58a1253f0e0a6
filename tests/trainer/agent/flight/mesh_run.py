"""A made-up job runs and something happens to it: which calls were made, begun and over, on every rank.

A simulation of hosts that run ahead of their GPUs, of GPUs that do one thing after the other, with a stream for every
process group, and of collectives that are over when all have begun them. It knows nothing of who analyses its records.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from tests.trainer.agent.flight.mesh_program import Call, Compute, HostWork, Instruction, Mesh, Sync, Wait

FOR_EVER = float("inf")
ALONE = ("broadcast",)
"""Operations that the first rank of a group may leave before the others have come."""
WATCHED_EVERY = 0.008
"""Seconds between two looks of the watchdog at what is over: as many collectives of these short ones as really."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens at a moment: `host` stops calling, `gpu` stops, `dead` both; `split`: no network between `ranks` and
    the others; `order`, `shape`, `skip`: the program of the rank differs at its instruction number `at`."""

    kind: str
    ranks: frozenset[int]
    time: float = 0.0
    blind: bool = False  # gpu: what watches it stops too, and so what is over is not seen
    at: int = 0


@dataclass(slots=True)
class Op:
    """One collective or message between all ranks that take part in it."""

    members: tuple[int, ...]
    call: Call
    joined: dict[int, float] = field(default_factory=dict)
    over: dict[int, float] = field(default_factory=dict)
    differs: bool = False


@dataclass(slots=True)
class Made:
    """A call as one rank has made it."""

    call: Call
    op: Op
    sequence: int
    time: float


@dataclass(slots=True)
class Rank:
    """Where one rank stands: host and GPU go through the same instructions."""

    code: Sequence[Instruction]
    host: int = 0
    gpu: int = 0
    now: float = 0.0  # of the host
    free: float = 0.0  # when the GPU has done all before `gpu`
    made: list[Made] = field(default_factory=list)
    by_place: dict[int, Made] = field(default_factory=dict)
    handles: dict[int, Made] = field(default_factory=dict)
    counts: dict[object, int] = field(default_factory=dict)
    streams: dict[object, deque[tuple[Made, float]]] = field(
        default_factory=dict
    )  # calls not begun, and when they could
    stream_free: dict[object, float] = field(default_factory=dict)


class Run:
    """One job from its start to the end of all movement."""

    def __init__(self, mesh: Mesh, code: Sequence[Sequence[Instruction]], faults: Sequence[Fault], seed: int) -> None:
        self.mesh, self.random = mesh, Random(seed)
        self.groups = mesh.groups()
        self.ranks = [Rank(self._edited(rank, one, faults)) for rank, one in enumerate(code)]
        self.host_ends = [self._end(faults, rank, ("host", "dead")) for rank in range(mesh.world)]
        self.gpu_ends = [self._end(faults, rank, ("gpu", "dead")) for rank in range(mesh.world)]
        self.splits = [fault for fault in faults if fault.kind == "split"]
        self.ops: dict[object, Op] = {}
        self.pace = [0.5 + self.random.random() for _ in range(mesh.world)]
        todo = deque(range(mesh.world))
        self._todo, self._queued = todo, set(todo)
        while todo:
            rank = todo.popleft()
            self._queued.discard(rank)
            self._advance(rank)

    @staticmethod
    def _end(faults: Sequence[Fault], rank: int, kinds: tuple[str, ...]) -> float:
        return min((one.time for one in faults if rank in one.ranks and one.kind in kinds), default=FOR_EVER)

    @staticmethod
    def _edited(rank: int, code: Sequence[Instruction], faults: Sequence[Fault]) -> Sequence[Instruction]:
        """The instructions of a rank whose program differs."""
        for fault in faults:
            if rank not in fault.ranks or fault.kind not in ("order", "shape", "skip"):
                continue
            code, call = list(code), code[fault.at]
            assert isinstance(call, Call)
            if fault.kind == "skip":
                code[fault.at] = HostWork(0.0)
            elif fault.kind == "shape":
                code[fault.at] = Call(call.group, call.op, call.size + 1, call.waits, handle=call.handle)
            else:
                other = "all_reduce" if call.op != "all_reduce" else "_all_gather_base"
                code[fault.at] = Call(call.group, other, call.size, call.waits, handle=call.handle)
        return code

    def _wake(self, rank: int) -> None:
        if rank not in self._queued:
            self._queued.add(rank)
            self._todo.append(rank)

    def _advance(self, rank: int) -> None:
        """As far as this rank gets by now."""
        one, moved = self.ranks[rank], True
        while moved:
            moved = self._host(rank, one)
            for stream in one.streams:
                moved = self._begin(rank, one, stream) or moved
            moved = self._gpu(rank, one) or moved

    def _host(self, rank: int, one: Rank) -> bool:
        began = one.host
        while one.host < len(one.code):
            what = one.code[one.host]
            if isinstance(what, Sync):
                if one.gpu < one.host:
                    break
                one.now = max(one.now, one.free)
            elif isinstance(what, HostWork):
                one.now += what.seconds * self.pace[rank]
            else:
                one.now += 2e-5
            if one.now >= self.host_ends[rank]:
                one.now = FOR_EVER
                break
            if isinstance(what, Call):
                self._make(rank, one, what)
            one.host += 1
        return one.host > began

    def _make(self, rank: int, one: Rank, call: Call) -> None:
        key = (call.group, min(rank, call.peer), max(rank, call.peer), (rank < call.peer) == (call.op == "send"))
        key = key if call.peer >= 0 else call.group
        number = one.counts[key] = one.counts.get(key, 0) + 1
        members = self.groups[call.group] if call.peer < 0 else tuple(sorted((rank, call.peer)))
        op = self.ops.setdefault((key, number), Op(members, call))
        if call.peer < 0 and ((op.call.op, op.call.size) != (call.op, call.size)) and call.op != "all_to_all":
            op.differs = True
        made = Made(call, op, number, one.now)
        one.made.append(made)
        one.by_place[one.host] = one.handles[call.handle] = made

    def _gpu(self, rank: int, one: Rank) -> bool:
        began, end = one.gpu, self.gpu_ends[rank]
        while one.gpu < one.host:
            what = one.code[one.gpu]
            if isinstance(what, Compute):
                if (free := max(one.free, 0.0) + what.seconds * self.pace[rank]) >= end:
                    break
                one.free = free
            elif isinstance(what, Call):
                made = one.by_place[one.gpu]
                stream = one.streams.setdefault(self._stream(rank, what), deque())
                if rank not in made.op.joined and not any(other is made for other, _ in stream):
                    stream.append((made, max(one.free, made.time)))
                    self._begin(rank, one, self._stream(rank, what))
                if what.waits and not self._over(one, rank, made):
                    break
            elif isinstance(what, Wait):
                called = one.handles.get(what.handle)
                if called is not None and not self._over(one, rank, called):
                    break
            one.gpu += 1
        return one.gpu > began

    @staticmethod
    def _stream(rank: int, call: Call) -> object:
        return call.group if call.peer < 0 else (call.group, call.peer, call.op)

    @staticmethod
    def _over(one: Rank, rank: int, made: Made) -> bool:
        if rank not in made.op.over:
            return False
        one.free = max(one.free, made.op.over[rank])
        return True

    def _begin(self, rank: int, one: Rank, stream: object) -> bool:
        """The next calls of a stream, as far as those before them are over."""
        queue, began = one.streams[stream], len(one.streams[stream])
        while queue:
            made, ready = queue[0]
            if rank in made.op.over:
                queue.popleft()
                one.stream_free[stream] = made.op.over[rank]
                continue
            at = max(ready, one.stream_free.get(stream, 0.0))
            if rank in made.op.joined or at >= self.gpu_ends[rank]:
                break
            made.op.joined[rank] = at
            self._complete(made.op)
        return len(queue) < began

    def _complete(self, op: Op) -> None:
        """Once all have begun it; what is under way when something happens may be over for some."""
        first = op.members[0]
        if op.call.op in ALONE and first in op.joined and first not in op.over and not op.differs:
            self._end_for(op, first, op.joined[first] + 1e-4, partly=1.0)
        if len(op.joined) < len(op.members) or op.differs:
            return
        over = max(op.joined.values()) + 1e-4 * (1 + self.random.random())
        broken = [end for rank in op.members if (end := self.gpu_ends[rank]) <= over]
        broken += [one.time for one in self.splits if one.time <= over and self._crosses(op, one)]
        for rank in op.members:
            if rank not in op.over:
                self._end_for(op, rank, over + 2e-5 * self.random.random(), partly=0.3 if broken else 1.0)

    @staticmethod
    def _crosses(op: Op, split: Fault) -> bool:
        return 0 < len(split.ranks & set(op.members)) < len(op.members)

    def _end_for(self, op: Op, rank: int, time: float, partly: float) -> None:
        if time >= self.gpu_ends[rank] or (partly < 1.0 and self.random.random() >= partly):
            return
        # Nothing gets through a split network that had not begun before.
        if any(max(op.joined.values()) >= one.time and self._crosses(op, one) for one in self.splits):
            return
        op.over[rank] = time
        self._wake(rank)

    # -- what is to be seen afterwards

    def pending(self, rank: int) -> list[Made]:
        """What it has called and what is not over."""
        return [made for made in self.ranks[rank].made if rank not in made.op.over]
