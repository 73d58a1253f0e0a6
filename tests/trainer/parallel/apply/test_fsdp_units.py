"""Choice of FSDP units."""

import pytest
from torch import nn

from trainer.parallel.apply.fsdp_units import CannotShard, chosen_units, fsdp_units


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.inner = nn.Sequential(nn.ModuleList([nn.Linear(4, 4)]))


class Model(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.trunk, self.act, self.head = Trunk(), nn.ReLU(), nn.Linear(4, 8, bias=False)
        self.blocks = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.ReLU()})
        if tied:
            self.head.weight = self.trunk.embedding.weight


def test_children_and_members_of_lists_are_units() -> None:
    model = Model(tied=False)
    assert fsdp_units(model) == [model.trunk, model.head, model.blocks["a"]]


def test_what_shares_a_parameter_is_left_to_the_whole_and_its_lists_are_not() -> None:
    model = Model(tied=True)
    assert fsdp_units(model) == [*model.trunk.layers, model.trunk.inner[0][0], model.blocks["a"]]


def test_members_that_share_a_parameter_are_no_units() -> None:
    model = Model(tied=True)
    model.trunk.layers[1].weight = model.blocks["a"].weight
    assert fsdp_units(model) == [model.trunk.layers[0], model.trunk.inner[0][0]]


def test_a_child_that_shares_within_itself_is_a_unit() -> None:
    model = Model(tied=False)
    model.trunk.layers[1].weight = model.trunk.layers[0].weight
    assert fsdp_units(model) == [model.trunk, model.head, model.blocks["a"]]


def test_lists_within_lists_are_opened() -> None:
    model = nn.Module()
    model.stages = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.ReLU()]), nn.ModuleDict({"a": nn.Linear(2, 2)})])
    assert fsdp_units(model) == [model.stages[0][0], model.stages[1]["a"]]


def test_units_by_class_come_inner_ones_first() -> None:
    model = Model(tied=False)
    chosen = chosen_units(model, "Trunk, Linear", [])
    assert chosen == [*model.trunk.layers, model.trunk.inner[0][0], model.trunk, model.head, model.blocks["a"]]


def test_units_by_size_have_so_many_parameters_of_their_own() -> None:
    model = Model(tied=False)  # linear 4 x 4 with bias: 20, embedding and head: 32
    assert chosen_units(model, "32", []) == [model.trunk.embedding, model.trunk, model.head]
    assert chosen_units(model, "100", []) == []
    assert chosen_units(model, "auto", [model.head]) == [model.head]


def test_what_shares_a_parameter_is_never_chosen() -> None:
    model = Model(tied=True)
    assert chosen_units(model, "Trunk,Embedding,Linear", []) == [
        *model.trunk.layers,
        model.trunk.inner[0][0],
        model.blocks["a"],
    ]


def test_a_class_that_the_model_does_not_have_is_named() -> None:
    with pytest.raises(CannotShard, match="no module of class Block, only Embedding, Linear"):
        chosen_units(Model(tied=False), "Linear,Block", [])


def test_what_is_no_module_of_its_own_is_no_class_to_wrap() -> None:
    for name in ("Model", "ModuleList"):
        with pytest.raises(CannotShard, match=f"no module of class {name}"):
            chosen_units(Model(tied=False), name, [])
