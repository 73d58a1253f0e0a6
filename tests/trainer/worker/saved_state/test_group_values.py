"""Changes of parameter-group values whose type is not saved are detected."""

from typing import Any

import pytest
import torch
from torch import nn

from checkpointing.storage.digests import digest
from trainer.worker.saved_state.group_values import GroupValues, _identities


class Plain:
    def __init__(self) -> None:
        self.count = 1

    def rate(self) -> int:
        return self.count


class HoldsItself(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.itself = [self]


class Uncopied(Plain):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("cannot be copied")


class ByName(Plain):
    def __init__(self, name: str = "FIRST") -> None:
        super().__init__()
        self.name = name

    def __reduce__(self) -> str:
        return self.name


def made(value: Any) -> tuple[GroupValues, dict[str, Any]]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["own"] = value
    return GroupValues(optimizer, {parameter: name for name, parameter in model.named_parameters()}), (
        optimizer.param_groups[0]
    )


def unsaved(values: GroupValues) -> list[str]:
    values.changed_values()
    return list(values.unsaved.values())


@pytest.mark.parametrize("kind", [Plain, HoldsItself])
def test_a_change_inside_a_value_is_noticed_and_taken_back(kind: type[Plain]) -> None:
    value = kind()
    values, group = made(value)
    assert unsaved(values) == []
    value.count = 2
    assert unsaved(values) == [f"own of the parameter groups (a {kind.__name__})"]
    values.reset()
    assert unsaved(values) == []
    assert group["own"].count == 1
    assert group["own"].rate() == 1


def test_a_method_is_the_same_one_however_often_it_is_looked_up() -> None:
    value = Plain()
    values, group = made(value.rate)
    group["own"] = value.rate
    assert unsaved(values) == []
    group["own"] = Plain().rate
    assert unsaved(values) == ["own of the parameter groups (a method)"]


def test_what_is_known_by_its_name_is_compared_by_it() -> None:
    values, group = made(ByName())
    assert unsaved(values) == []
    group["own"] = ByName("SECOND")
    assert unsaved(values) == ["own of the parameter groups (a ByName)"]


def test_of_a_value_that_cannot_be_copied_nothing_is_known() -> None:
    value = Uncopied()
    values, group = made(value)
    assert unsaved(values) == ["own of the parameter groups (a Uncopied)"]
    values.reset()
    assert group["own"] is value


def test_groups_are_known_by_their_parameters_and_empty_ones_by_their_number() -> None:
    names = ("#1", "a\nb", "#2")
    assert list(_identities([[], ["a", "b"], []])) == [digest(name.encode())[:16] for name in names]
