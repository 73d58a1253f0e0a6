"""Restore of a rank's state, with and without a checkpoint."""

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from trainer.parallel.apply import mesh
from trainer.worker.saved_state import checkpoint_contents, object_state
from trainer.worker.saved_state.loss_scale import FIRST, LossScale
from trainer.worker.saved_state.train_state import TrainObjects, TrainState
from trainer.worker.startup.software import changed_software, software, software_facts


class NoData:
    consumed = 0

    def take(self) -> list[Any]:
        return []

    def seek(self, consumed: int) -> None:
        self.consumed = consumed


class SaverWith:
    """Saver with a checkpoint of this step in which every number is 1, or with none."""

    def __init__(self, step: int | None, **facts: Any) -> None:
        self._step, self._facts = step, facts
        self.read: list[str] = []

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> None:
        pass

    def restore(self, targets: Callable[[dict[str, Any]], Mapping[str, torch.Tensor]], **_: Any) -> Any:
        if self._step is None:
            return None
        extra = {"step": self._step, "loss": 1.0, "consumed": 0, "rank_state": [{}], **self._facts}
        for key, tensor in targets(extra).items():
            self.read.append(key)
            if not key.startswith("rng/"):
                tensor.fill_(1)
        return SimpleNamespace(step=self._step, extra=extra, absent=())


class KeepsFacts(SaverWith):
    def __init__(self, step: int | None) -> None:
        super().__init__(step)
        self.given: list[dict[str, Any]] = []

    def save(self, step: int, tensors: Mapping[str, torch.Tensor], extra: dict[str, Any], *_: Any, **__: Any) -> bool:
        self.given.append(extra)
        return True


def restored(layout: mesh.Layout, step: int | None) -> tuple[list[str], nn.Linear]:
    model, called = nn.Linear(2, 2), list[str]()
    with torch.no_grad():
        model.weight.fill_(float("nan"))

    def set_weights() -> None:
        called.append("set")
        nn.init.zeros_(model.weight)

    objects = TrainObjects(
        workload=SimpleNamespace(), model=model, optimizer=torch.optim.AdamW(model.parameters()), data=NoData(),
        layout=layout, set_initial_weights=set_weights,
    )  # fmt: skip
    TrainState(objects, config_digest="", seed=1).restore(SaverWith(step))
    return called, model


def state_of(layout: mesh.Layout, model: nn.Module, loss_scale: LossScale | None = None) -> TrainState:
    objects = TrainObjects(
        workload=SimpleNamespace(), model=model, optimizer=torch.optim.AdamW(model.parameters()), data=NoData(),
        layout=layout,
    )  # fmt: skip
    return TrainState(objects, config_digest="", seed=1, loss_scale=loss_scale)


def test_weights_that_no_checkpoint_has_are_set(layout: mesh.Layout) -> None:
    called, model = restored(layout, None)
    assert called == ["set"]
    assert torch.equal(model.weight, torch.zeros(2, 2))


def test_weights_that_a_checkpoint_has_cost_no_time(layout: mesh.Layout) -> None:
    called, model = restored(layout, 5)
    assert called == []
    assert torch.equal(model.weight, torch.ones(2, 2))


def test_a_counter_is_read_from_its_ranks_buffers(layout: mesh.Layout) -> None:
    model, saver = nn.BatchNorm1d(2), SaverWith(5)
    state_of(layout, model).restore(saver)
    assert "buffers/rank-00000/num_batches_tracked" in saver.read
    assert model.num_batches_tracked == 1


@pytest.mark.parametrize(("facts", "losses"), [({}, []), ({"accepted_losses": [0.5, 0.25]}, [0.5, 0.25])])
def test_accepted_losses_are_those_of_the_checkpoint_if_it_has_any(
    layout: mesh.Layout, facts: dict[str, Any], losses: list[float]
) -> None:
    state = state_of(layout, nn.Linear(2, 2))
    state.restore(SaverWith(5, **facts))
    assert list(state.accepted_losses) == losses


@pytest.mark.parametrize(
    ("facts", "position"), [({"consumed": 7}, 7), ({"consumed": 3, "position": 43}, 43)], ids=["imported", "own"]
)
def test_positions_go_on_from_that_of_the_checkpoint(layout: mesh.Layout, facts: dict[str, Any], position: int) -> None:
    state = state_of(layout, nn.Linear(2, 2))
    state.restore(SaverWith(5, **facts))
    assert state.positions.next == position


def test_the_scale_of_the_loss_goes_on_and_where_there_is_none_nothing_is_saved(layout: mesh.Layout) -> None:
    saver = KeepsFacts(None)
    before = state_of(layout, nn.Linear(2, 2), LossScale("float16"))
    assert before.loss_scale.update_scale(math.inf)
    assert before.save(saver)
    after = state_of(layout, nn.Linear(2, 2), LossScale("float16"))
    after.restore(SaverWith(5, loss_scale=saver.given[0]["loss_scale"]))
    assert (after.loss_scale.scale, after.loss_scale.overflows) == (FIRST / 2, 1)
    assert state_of(layout, nn.Linear(2, 2)).save(saver)
    assert "loss_scale" not in saver.given[1]


def test_further_names_of_shared_tensors_are_saved(layout: mesh.Layout) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    saver = KeepsFacts(None)

    state = state_of(layout, model)
    state.restore(saver)
    assert state.save(saver)
    assert saver.given[0][checkpoint_contents.SHARED_NAMES] == {"1.weight": "0.weight"}


class ReadsAhead(NoData):
    """Data whose thread may read ahead between two calls; each answer is complete in itself."""

    def __init__(self) -> None:
        self.read = 0

    def state_dict(self) -> dict[str, Any]:
        self.read += 1
        return {"read": self.read, "ahead": [torch.full((2,), self.read) for _ in range(self.read)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read = state["read"]


@pytest.mark.parametrize("owner", ["workload", "data"])
def test_numbers_and_tensors_of_a_state_are_parts_of_one_answer(layout: mesh.Layout, owner: str) -> None:
    model, parts = nn.Linear(2, 2), {"workload": SimpleNamespace(), "data": NoData(), owner: ReadsAhead()}
    objects = TrainObjects(model=model, optimizer=torch.optim.AdamW(model.parameters()), layout=layout, **parts)
    given: list[Any] = []

    class Saver(SaverWith):
        def save(self, step: int, tensors: Mapping[str, torch.Tensor], extra: Any, facts: Any, trained: Any) -> bool:
            given.append(({key: tensor.clone() for key, tensor in tensors.items()}, facts[owner]))
            return True

    state = TrainState(objects, config_digest="", seed=1)
    state.restore(Saver(None))
    for _ in range(2):
        assert state.save(Saver(None))
    numbers = []
    for tensors, facts in given:
        saved = object_state.decode(facts["value"], tensors, {})
        assert [tensor.tolist() for tensor in saved["ahead"]] == [[saved["read"]] * 2] * saved["read"]
        numbers.append(saved["read"])
    assert numbers[0] < numbers[1]


def with_peer(layout: mesh.Layout, saver: SaverWith, peer: tuple[dict[str, Any], list[Any]]) -> list[Any]:
    model, found = nn.Linear(2, 2), list[Any]()
    objects = TrainObjects(
        workload=SimpleNamespace(), model=model, optimizer=torch.optim.SGD(model.parameters()), data=NoData(),
        layout=layout,
    )  # fmt: skip
    state = TrainState(
        objects, config_digest="", seed=1, warn=lambda *what: found.append(what),
        on_other_software=lambda *what: found.append(what),
    )  # fmt: skip
    state.restore(saver)
    state.compare_ranks(lambda mine: [mine, [{**mine[0], **peer[0]}, peer[1]]])
    return found


def test_other_software_of_any_rank_is_reported(layout: mesh.Layout) -> None:
    now = software(torch.device("cpu"))
    facts = software_facts([now, {**now, "torch": "1"}])
    assert with_peer(layout, SaverWith(5, **facts), ({"torch": "1"}, [])) == []
    assert with_peer(layout, SaverWith(5, **facts), ({"torch": "2"}, [])) == [(5, {"torch": ["1", "2"]}, {"torch": 1})]


def test_what_another_rank_has_lost_is_reported_with_its_number(layout: mesh.Layout) -> None:
    assert with_peer(layout, SaverWith(5), ({}, [[5, "workload.k had changed"]])) == [
        (5, "rank 1: workload.k had changed")
    ]


def test_equal_software_is_saved_once() -> None:
    many = [{"torch": "1"}, {"torch": "2"}, {"torch": "1"}, {"torch": "2"}]
    assert software_facts(many) == {
        "software": {"torch": "1"}, "rank_software": {"others": [{"torch": "2"}], "ranks": [0, 1, 0, 1]}
    }  # fmt: skip
    assert software_facts([{"torch": "1"}] * 3)["rank_software"] == {"others": [], "ranks": []}
    assert changed_software(software_facts(many), many[:3]) == ({}, {})


class Trains(torch.optim.SGD):
    def train(self) -> None:
        self.modes = [*getattr(self, "modes", []), "train"]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "own": object()}


class Counts:
    def __init__(self) -> None:
        self.seen = set(range(1200))
        for _ in range(960):  # its order is now another one than that of a new set
            self.seen.pop()

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Derives(nn.Linear):
    def _load_from_state_dict(self, state: Any, prefix: Any, metadata: Any, strict: Any, *more: Any) -> None:
        more[2].append("it does not fit")


def test_what_is_not_restored_or_not_saved_is_told_once(layout: mesh.Layout) -> None:
    model, found = Derives(2, 2), list[Any]()
    optimizer = Trains(model.parameters(), lr=0.1)
    objects = TrainObjects(workload=Counts(), model=model, optimizer=optimizer, data=NoData(), layout=layout)

    class Saver(SaverWith):
        def save(self, *_: Any, **__: Any) -> bool:
            return True

    state = TrainState(objects, config_digest="", seed=1, warn=lambda *what: found.append(what))
    state.restore(Saver(5))
    assert optimizer.modes == ["train"] * 2, "before its settings are read, and after its state is"
    assert found == [(5, "it does not fit"), (5, "the state of the workload is missing: it starts again")]
    found.clear()
    state.report_incomplete(3, "")
    state.report_incomplete(3, "workers have restarted")
    for _ in range(2):
        assert state.save(Saver(5))
    assert found == [
        (3, "workers have restarted"),
        (5, "workload:seen is a set, whose order a restart changes: if order matters, use a list, or sort it"),
        (5, "own of its state_dict (entries/own is a builtins.object) is not saved: its type cannot be serialized"),
    ]
