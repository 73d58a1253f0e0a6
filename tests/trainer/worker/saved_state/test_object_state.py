"""State of a user's object."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from checkpointing.storage.durable import canonical
from trainer.worker.saved_state.object_state import ObjectState
from trainer.worker.saved_state.unsaved_state import UnsavedAttributes
from trainer.worker.workload import WorkloadError


class Averages:
    def __init__(self) -> None:
        self.mean = torch.tensor([1.0, 2.0])
        seen = [1, 2]
        self.state: dict[str, Any] = {
            "now": self.mean, "history": [self.mean, self.mean.clone()], "part": self.mean[1:], "empty": torch.ones(0),
            "turned": self.mean.view(2, 1).T, "again": self.mean[1:], "seen": seen,
            "queue": [seen, {"of": seen}, [1, 2]],
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def saved_and_loaded(*owners: Averages) -> None:
    saved, loaded = (ObjectState(owner, "data", nn.Linear(2, 1), torch.device("cpu")) for owner in owners)
    facts = json.loads(canonical(saved.facts()))
    assert all(key.encode() for key in saved.tensors())
    for key, target in loaded.targets(facts).items():
        target.copy_(saved.tensors()[key])
    loaded.restore(facts)


def test_what_a_state_holds_twice_is_one_after_a_restore() -> None:
    owner, into = Averages(), Averages()
    saved_and_loaded(owner, into)
    assert len(ObjectState(owner, "data", nn.Linear(2, 1), torch.device("cpu")).tensors()) == 3

    into.state["now"] += 1
    assert into.state["history"][0].tolist() == [2.0, 3.0]
    assert into.state["history"][1].tolist() == [1.0, 2.0], "an equal tensor stays separate"
    assert into.state["part"].tolist() == into.state["again"].tolist() == [3.0]
    assert into.state["turned"].tolist() == [[2.0, 3.0]]
    assert into.state["empty"].shape == (0,)
    into.state["seen"].append(3)
    assert into.state["queue"] == [[1, 2, 3], {"of": [1, 2, 3]}, [1, 2]]


def test_tensors_that_are_trained_beside_the_model_still_are_after_a_restore() -> None:
    owner, into = Averages(), Averages()
    alpha, beta = torch.tensor([1.0], requires_grad=True), nn.Parameter(torch.tensor([2.0]))
    frozen = nn.Parameter(torch.tensor([3.0]), requires_grad=False)
    owner.state = {"alpha": alpha, "in": [alpha, beta], "beta": beta, "frozen": frozen, "result": alpha * 2}
    saved_and_loaded(owner, into)
    made = into.state
    assert [type(made[name]) for name in ("alpha", "beta", "frozen")] == [torch.Tensor, nn.Parameter, nn.Parameter]
    assert [made[name].requires_grad for name in ("alpha", "beta", "frozen", "result")] == [True, True, False, False]
    assert made["in"][0] is made["alpha"]
    assert made["in"][1] is made["beta"]
    assert [made[name].item() for name in ("alpha", "beta", "frozen", "result")] == [1.0, 2.0, 3.0, 2.0]


def test_parts_that_overlap_share_their_memory_after_a_restore() -> None:
    owner, into = Averages(), Averages()
    memory, ints, complexes = torch.arange(6.0), torch.arange(4.0), torch.arange(4.0)
    owner.state = {
        "first": memory[1:4], "second": memory[2:], "again": memory[2:], "apart": memory[:1],
        "float": ints, "bits": ints.view(torch.int32), "real": complexes,
        "complex": torch.view_as_complex(complexes.view(2, 2)),
    }  # fmt: skip
    saved_and_loaded(owner, into)
    into.state["second"] += 10
    assert into.state["first"].tolist() == [1.0, 12.0, 13.0]
    assert into.state["again"].tolist() == [12.0, 13.0, 14.0, 15.0]
    assert into.state["apart"].tolist() == [0.0]
    into.state["bits"].zero_()
    assert into.state["float"].tolist() == [0.0] * 4
    into.state["complex"] += 1
    assert into.state["real"].tolist() == [1.0, 1.0, 3.0, 3.0]


@pytest.mark.parametrize(
    "names", [("z", "conj"), ("conj", "z"), ("imag", "neg"), ("neg", "imag", "z"), ("row", "column")]
)
def test_views_of_complex_numbers_and_of_rows_come_back(names: tuple[str, ...]) -> None:
    owner, into = Averages(), Averages()
    z = torch.tensor([[1 + 2j, 3 + 4j], [5 + 6j, 7 + 8j]])
    views = {"z": z, "conj": z.conj(), "imag": z.imag[1], "neg": z.conj().imag[1], "row": z[1], "column": z[:, 1]}
    owner.state = {name: views[name] for name in names}
    saved_and_loaded(owner, into)
    for name in names:
        assert torch.equal(into.state[name], views[name]), name
    if "z" in names:
        into.state["z"][1, 1] = z[1, 1] = 0
        assert all(torch.equal(into.state[name], views[name]) for name in names), "they share their memory"


def test_a_column_under_two_names_does_not_save_its_matrix() -> None:
    owner = Averages()
    matrix = torch.zeros(100, 100)
    owner.state = {"one": matrix[:, 1], "two": matrix[:, 1]}
    tensors = ObjectState(owner, "data", nn.Linear(2, 1), torch.device("cpu")).tensors()
    assert [tensor.numel() for tensor in tensors.values()] == [100]


def test_a_list_that_holds_itself_is_refused_by_name() -> None:
    owner = Averages()
    owner.state = {"all": [1]}
    owner.state["all"].append(owner.state["all"])
    with pytest.raises(WorkloadError, match="data:all:1 holds itself"):
        ObjectState(owner, "data", nn.Linear(2, 1), torch.device("cpu")).facts()


def test_a_set_whose_order_a_restart_changes_is_named() -> None:
    model, device = nn.Linear(2, 1), torch.device("cpu")
    shrunk = set(range(1200))
    for _ in range(960):
        shrunk.pop()
    owner = Averages()
    owner.state = {"same": {3, 1, 2}, "names": {"b", "a"}, "in": [{"left": shrunk}]}
    state = ObjectState(owner, "data", model, device)
    assert list(set(sorted(shrunk))) != list(shrunk)
    state.facts()
    assert state.reordered_sets == {"data:in:0:left"}
    owner.state = {"same": {3, 1, 2}}
    state.facts()
    assert not state.reordered_sets


def test_names_of_files_that_are_no_utf8_come_back() -> None:
    owners = [Averages(), Averages()]
    owners[0].state = {"next": "caf\udce9.txt", "seen": {"caf\udce9.txt": torch.tensor([3.0])}}
    saved_and_loaded(*owners)
    assert owners[1].state == owners[0].state


class Attributes(dict[str, float]):
    __getattr__ = dict.__getitem__


class NeedsMore:
    def state_dict(self, destination: dict[str, float]) -> dict[str, float]:
        return destination


class NotReady:
    def state_dict(self) -> dict[str, float]:
        raise RuntimeError("call consolidate_state_dict() first")


def test_an_attribute_that_gives_no_state_is_left_alone() -> None:
    owner = SimpleNamespace(settings=Attributes(lr=0.1), more=NeedsMore(), later=NotReady(), count=1)
    attributes = UnsavedAttributes({"workload": owner})
    owner.count = 2
    assert attributes.changed_attributes() == {"workload.count": "2"}


def test_long_bytes_are_kept_as_a_tensor_and_short_ones_in_the_json() -> None:
    for size, tensors in ((4096, 0), (4097, 1)):
        owner, into = Averages(), Averages()
        owner.state = {"seen": bytes(range(256)) * 16 + b"x" * (size - 4096)}
        assert len(ObjectState(owner, "data", nn.Linear(2, 1), torch.device("cpu")).tensors()) == tensors
        saved_and_loaded(owner, into)
        assert into.state == owner.state


def test_a_state_that_the_object_cannot_take_is_refused() -> None:
    def state(owner: Any) -> ObjectState:
        return ObjectState(owner, "data", nn.Linear(2, 1), torch.device("cpu"))

    facts = state(Averages()).facts()
    without = state(SimpleNamespace())
    without.restore({})
    with pytest.raises(WorkloadError, match=r"^the checkpoint has a state for the data, but .* has no load_state_dict"):
        without.restore(facts)
    sharded = {"forms": {"data:now": ["float32", [2], "cpu", True]}}
    with pytest.raises(WorkloadError, match="^the checkpoint has data:now .*, but no parameter is sharded that way$"):
        state(Averages()).targets(sharded)
