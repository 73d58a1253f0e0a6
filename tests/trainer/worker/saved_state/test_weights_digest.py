"""The weights' digest is equal in every layout; pipeline stages are two threads."""

import queue
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from trainer.worker.saved_state import checkpoint_contents as module
from trainer.worker.saved_state.checkpoint_contents import weights_digest

CPU = torch.device("cpu")


class Group:
    def __init__(self) -> None:
        self.place = threading.local()
        self.given: dict[int, torch.Tensor] = {}
        self.barrier = threading.Barrier(2)
        self.boxes: dict[tuple[int, int], queue.Queue[torch.Tensor]] = defaultdict(queue.Queue)

    def size(self) -> int:
        return 2

    def all_gather(self, rows: list[torch.Tensor], row: torch.Tensor, *, group: Any) -> None:
        self.given[self.place.number] = row.clone()
        self.barrier.wait(20)
        for number, found in enumerate(rows):
            found.copy_(self.given[number])
        self.barrier.wait(20)

    def send(self, tensor: torch.Tensor, target: int, *, group: Any) -> None:
        self.boxes[self.place.number, target].put(tensor)

    def recv(self, tensor: torch.Tensor, source: int, *, group: Any) -> None:
        tensor.copy_(self.boxes[source, 0].get(timeout=20))


def layout(rank: int, *, pp: int = 1, place: int = 0, group: Any = None) -> Any:
    return SimpleNamespace(
        rank=rank, device=CPU, sizes={"pp": pp}, place={"pp": place},
        pp=SimpleNamespace(get_group=lambda: group),
    )  # fmt: skip


def parts() -> dict[str, nn.Module]:
    torch.manual_seed(1)
    made: dict[str, nn.Module] = {name: nn.Linear(3, 2) for name in "abc"}
    made["b"].half()
    made["c"].register_buffer("seen", torch.arange(5))
    return made


def model(*names: str) -> nn.Module:
    every = parts()
    return nn.ModuleDict({name: every[name] for name in names})


def test_only_rank_0_has_it_and_it_is_of_names_types_shapes_and_values() -> None:
    first = weights_digest(model("a", "b"), layout(0))
    assert first == weights_digest(model("b", "a"), layout(0))
    assert first is not None
    assert len(first) == 32
    assert weights_digest(model("a", "b"), layout(1)) is None
    others = [model("a", "b") for _ in range(4)]
    others[0].a.weight.data[0, 0] += 1  # type: ignore[union-attr]
    others[1].a.weight.data = others[1].a.weight.data.view(3, 2)  # type: ignore[union-attr]
    others[2].b.float()  # type: ignore[operator]
    others[3].a.register_buffer("more", torch.zeros(1))  # type: ignore[union-attr]
    assert len({first, *(weights_digest(one, layout(0)) for one in others)}) == 5


def test_large_tensors_are_read_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = weights_digest(model("a", "b", "c"), layout(0))
    monkeypatch.setattr(module, "_HASH_CHUNK", 7)
    assert weights_digest(model("a", "b", "c"), layout(0)) == whole
    turned = model("a", "b", "c")
    turned.a.weight.data = turned.a.weight.data.t().contiguous().t()  # type: ignore[union-attr]
    assert weights_digest(turned, layout(0)) == whole, "however it lies in memory"


@pytest.mark.usefixtures("world")
def test_shards_are_put_together() -> None:
    plain, sharded = model("a"), model("a")
    mesh = init_device_mesh("cpu", (1,))
    sharded.a.weight = nn.Parameter(DTensor.from_local(sharded.a.weight.detach(), mesh, [Shard(0)]))  # type: ignore[union-attr]
    assert weights_digest(sharded, layout(0)) == weights_digest(plain, layout(0))


@pytest.mark.parametrize(("first", "second"), [("ac", "b"), ("b", "ac"), ("abc", "")])
def test_stages_have_the_digest_of_the_whole_model(monkeypatch: pytest.MonkeyPatch, first: str, second: str) -> None:
    group = Group()
    for name in ("all_gather", "send", "recv"):
        monkeypatch.setattr(dist, name, getattr(group, name))
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])
    stages = [model(*first), model(*second)]

    def of_rank(number: int) -> str | None:
        group.place.number = number
        return weights_digest(stages[number], layout(number, pp=2, place=number, group=group))

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(of_rank, range(2)))
    assert found == [weights_digest(model(*"abc"), layout(0)), None]
    assert all(box.empty() for box in group.boxes.values())


def test_another_pipeline_with_the_same_weights_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group()
    monkeypatch.setattr(dist, "all_gather", lambda rows, row, group: [one.copy_(row) for one in rows])
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [2, 3])
    for place in (0, 1):
        assert weights_digest(model("a"), layout(2 + place, pp=2, place=place, group=group)) is None
