"""What the ranks of a made-up training job do, instruction by instruction: any mesh, any mix of parallelism."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Sizes of the dimensions; rank = ((stage * data + replica) * context + piece) * tensor + shard."""

    stages: int = 1
    data: int = 1
    context: int = 1
    tensor: int = 1
    experts: int = 1  # ranks of one stage among which experts are spread; 1: none

    @property
    def per_stage(self) -> int:
        return self.data * self.context * self.tensor

    @property
    def world(self) -> int:
        return self.stages * self.per_stage

    def groups(self) -> dict[str, tuple[int, ...]]:
        """All process groups by name; names are numbers that count up, as torch gives them."""
        ranks, tensor, context, block = range(self.world), self.tensor, self.context, self.per_stage
        kinds = [[tuple(ranks)]]
        kinds.append([tuple(r for r in ranks if r // tensor == k) for k in range(self.world // tensor)])
        kinds.append([tuple(r for r in ranks if (r // (tensor * context), r % tensor) == key)
                      for key in dict.fromkeys((r // (tensor * context), r % tensor) for r in ranks)])  # fmt: skip
        kinds.append([tuple(r for r in ranks if (r // block, r % (tensor * context)) == key)
                      for key in dict.fromkeys((r // block, r % (tensor * context)) for r in ranks)])  # fmt: skip
        kinds.append([tuple(r for r in ranks if r // self.experts == k) for k in range(self.world // self.experts)])
        kinds.append([tuple(r for r in ranks if r % block == k) for k in range(block)])
        found, number = {}, 0
        for kind, groups in zip(KINDS, kinds, strict=True):
            for members in groups:
                found[f"{kind}:{number}"] = members
                number += 1
        return found


KINDS = ("world", "tensor", "context", "data", "expert", "pipeline")


@dataclass(frozen=True, slots=True)
class Call:
    """A collective, or one end of a message (`peer`)."""

    group: str
    op: str
    size: int = 4
    waits: bool = True  # the GPU's later work waits for it
    peer: int = -1  # rank of the world
    handle: int = 0  # by which a later `Wait` knows it
    batch: int = 0  # messages of one batch_isend_irecv; 0: none


@dataclass(frozen=True, slots=True)
class Compute:
    seconds: float


@dataclass(frozen=True, slots=True)
class HostWork:
    seconds: float


@dataclass(frozen=True, slots=True)
class Wait:
    """The GPU's later work waits for a call that was made without waiting."""

    handle: int


@dataclass(frozen=True, slots=True)
class Sync:
    """The host waits for its GPU, as `.item()` does."""


Instruction = Call | Compute | HostWork | Wait | Sync


@dataclass(frozen=True, kw_only=True)
class Style:
    """How the job is written."""

    layers: int = 1
    batches: int = 2  # micro-batches of a step
    steps: int = 3
    fsdp: bool = False
    overlapped: bool = True  # gradients are reduced while others are still computed
    counted: bool = False  # the host reads how many tokens each expert gets
    batched: bool = False  # messages through batch_isend_irecv
    broadcast: bool = False  # data is broadcast in the tensor parallel group


@dataclass
class Program:
    """One rank's instructions."""

    mesh: Mesh
    style: Style
    rank: int
    mine: dict[str, str] = field(default_factory=dict)  # by kind: the group this rank is in
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    code: list[Instruction] = field(default_factory=list)
    _handles: int = 0
    _batches: int = 0

    def __post_init__(self) -> None:
        for name, members in self.mesh.groups().items():
            if self.rank in members:
                self.mine[name.partition(":")[0]] = name
                self.members[name] = members
        for _ in range(self.style.steps):
            self._step()

    @property
    def stage(self) -> int:
        return self.rank // self.mesh.per_stage

    def _call(self, kind: str, op: str, *, waits: bool = True, size: int = 4) -> int:
        group = self.mine[kind]
        if len(self.members[group]) < 2:
            return 0
        self._handles += 1
        self.code.append(Call(group, op, size, waits, handle=self._handles))
        return self._handles

    def _wait(self, handle: int) -> None:
        if handle:
            self.code.append(Wait(handle))

    def _step(self) -> None:
        self.code.append(HostWork(0.002))
        forward, backward = 0, 0
        warm = min(self.mesh.stages - self.stage - 1, self.style.batches)
        for _ in range(warm):
            forward = self._forward(forward)
        for _ in range(self.style.batches - warm):
            forward = self._forward(forward)
            backward = self._backward(backward)
        while backward < self.style.batches:
            backward = self._backward(backward)
        self._call("world", "all_reduce", size=1)
        self.code += [Sync(), Compute(0.001)]

    def _message(self, op: str, stage: int) -> int:
        """To or from the same place in another stage; a receive is waited for at once, a send never."""
        if not 0 <= stage < self.mesh.stages:
            return 0
        peer = stage * self.mesh.per_stage + self.rank % self.mesh.per_stage
        self._handles += 1
        self._batches += self.style.batched
        batch = self._batches if self.style.batched else 0
        self.code.append(Call(self.mine["pipeline"], op, 64, op == "recv", peer, self._handles, batch))
        return self._handles

    def _forward(self, number: int) -> int:
        self._message("recv", self.stage - 1)
        if self.style.broadcast:
            self._call("tensor", "broadcast", size=8)
        gathered = self._call("data", "_all_gather_base", waits=False, size=32) if self.style.fsdp else 0
        for layer in range(self.style.layers):
            self._wait(gathered)
            more = self.style.fsdp and layer + 1 < self.style.layers
            gathered = self._call("data", "_all_gather_base", waits=False, size=32) if more else 0
            self._layer()
        self._message("send", self.stage + 1)
        return number + 1

    def _layer(self) -> None:
        self._call("tensor", "_all_gather_base", size=16)
        self.code.append(Compute(0.001))
        self._call("context", "_all_gather_base", size=16)
        if self.mesh.experts > 1:
            self._call("expert", "_all_gather_base", size=2)
            if self.style.counted:
                self.code.append(Sync())
            self._call("expert", "all_to_all", size=16 + self.rank)
            self.code.append(Compute(0.001))
            self._call("expert", "all_to_all", size=16 + self.rank)
        self._call("tensor", "_reduce_scatter_base", size=16)

    def _backward(self, number: int) -> int:
        self._message("recv", self.stage + 1)
        last, reduced = number + 1 == self.style.batches, []
        for _ in range(self.style.layers):
            self._layer()
            if last:
                op = "_reduce_scatter_base" if self.style.fsdp else "all_reduce"
                reduced.append(self._call("data", op, waits=not self.style.overlapped, size=32))
        self._message("send", self.stage - 1)
        for handle in reduced if self.style.overlapped else ():
            self._wait(handle)
        return number + 1


def drawn(random: Random) -> tuple[Mesh, Style]:
    """Some job of 2 to 32 ranks."""
    while True:
        sizes = {name: random.choice((1, 1, 2, 2, 4)) for name in ("stages", "data", "tensor")}
        mesh = Mesh(**sizes, context=random.choice((1, 1, 1, 2)))
        if 2 <= mesh.world <= 32:
            break
    experts = random.choice([size for size in (1, 2, 4, 8) if mesh.per_stage % size == 0])
    mesh = Mesh(**sizes, context=mesh.context, experts=experts)
    flags = ("fsdp", "overlapped", "counted", "batched", "broadcast")
    style = Style(
        layers=random.choice((1, 1, 2)), batches=random.choice((1, 2, 3)), steps=3,
        **{name: random.random() < 0.5 for name in flags},
    )  # fmt: skip
    return mesh, style


def programs(mesh: Mesh, style: Style) -> Iterator[list[Instruction]]:
    for rank in range(mesh.world):
        yield Program(mesh, style, rank).code
