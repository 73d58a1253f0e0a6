"""State of a user's object."""

import json
from typing import Any

import torch
from torch import nn

from checkpointing.storage.durable import canonical
from trainer.worker.saved_state.object_state import ObjectState


class Averages:
    """Keeps one tensor under two names, and others that only look like it."""

    def __init__(self) -> None:
        self.mean = torch.tensor([1.0, 2.0])
        self.state: dict[str, Any] = {
            "now": self.mean, "history": [self.mean, self.mean.clone()], "part": self.mean[:1], "empty": torch.ones(0),
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_a_tensor_that_a_state_holds_twice_is_one_tensor_after_a_restore() -> None:
    model, device = nn.Linear(2, 1), torch.device("cpu")
    saved, loaded = (ObjectState(Averages(), "workload", model, device) for _ in range(2))
    into = loaded._owner
    assert isinstance(into, Averages)
    facts = saved.facts()
    for key, target in loaded.targets(facts).items():
        target.copy_(saved.tensors()[key])
    loaded.restore(facts)

    into.state["now"] += 1
    assert into.state["history"][0].tolist() == [2.0, 3.0]
    assert into.state["history"][1].tolist() == [1.0, 2.0], "an equal tensor stays separate"
    assert into.state["part"].tolist() == [1.0]
    assert into.state["empty"].shape == (0,)


def test_a_set_whose_order_a_restart_changes_is_named() -> None:
    """Python iterates a set by its table, which depends on what the set had before."""
    model, device = nn.Linear(2, 1), torch.device("cpu")
    shrunk = set(range(1200))
    for _ in range(960):
        shrunk.pop()
    owner = Averages()
    owner.state = {"same": {3, 1, 2}, "names": {"b", "a"}, "in": [{"left": shrunk}]}
    state = ObjectState(owner, "data", model, device)
    assert list(set(sorted(shrunk))) != list(shrunk)
    state.facts()
    assert state.reordered == {"data:in:0:left"}
    owner.state = {"same": {3, 1, 2}}
    state.facts()
    assert not state.reordered


def test_names_of_files_that_are_no_utf8_come_back() -> None:
    """`os.listdir` has a lone surrogate for each byte that is no UTF-8."""
    model, device = nn.Linear(2, 1), torch.device("cpu")
    owners = [Averages(), Averages()]
    owners[0].state = {"next": "caf\udce9.txt", "seen": {"caf\udce9.txt": torch.tensor([3.0])}}
    saved, loaded = (ObjectState(owner, "data", model, device) for owner in owners)
    facts = json.loads(canonical(saved.facts()))
    assert all(key.encode() for key in saved.tensors())
    for key, target in loaded.targets(facts).items():
        target.copy_(saved.tensors()[key])
    loaded.restore(facts)
    assert owners[1].state == owners[0].state
