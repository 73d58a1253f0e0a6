"""Attributes outside checkpoints: which changes are detected, and when a lost one is reported."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from trainer.worker.saved_state.unsaved_state import ModuleAttributes, UnsavedAttributes


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Any = 0
        self.inner = nn.Dropout(0.5)


def lost(saved: dict[str, str], calls: list[Any], step: int = 10) -> list[list[str]]:
    """Return the reports of each step after a restart, at whose ends the attribute has these values."""
    model = Counts()
    attributes = ModuleAttributes(model)
    model.calls = calls[0]
    attributes.begin(saved, step)
    found = []
    for value in calls[1:]:
        model.calls = value
        found.append(attributes.step_ended())
    return found


@pytest.mark.parametrize(
    ("saved", "calls", "is_lost"),
    [
        ("5", [0, 0, 0, 0], True),
        ("5", [5, 0, 0, 0], False),  # it was there when training began
        ("30", [0, 3, 6, 9], True),  # it rises by three in a step, and did so in ten steps
        ("37", [7, 10, 13, 16], True),
        ("31", [0, 3, 6, 9], False),
        ("30", [0, 3, 6, 10], False),
        ("30", [0, 0, 0, 9], False),
        ("'a'", ["b", "c", "b", "c"], False),  # it changes by itself
    ],
)
def test_an_attribute_is_lost_if_it_stays_or_counts_anew(saved: str, calls: list[Any], is_lost: bool) -> None:
    name = "model.calls"
    assert lost({name: saved}, [*calls, 77]) == [[], [], [name] if is_lost else [], []]


def test_only_short_plain_attributes_of_modules_are_looked_at_and_not_too_many() -> None:
    model = Counts()
    attributes = ModuleAttributes(model)
    assert attributes.changed_attributes() == {}
    model.calls, model.inner.p, model._own = (1, "a"), 0.25, 3
    model.eval()
    assert attributes.changed_attributes() == {"model.calls": "(1, 'a')", "model.inner.p": "0.25"}
    model.calls = "x" * 98
    assert "model.calls" in attributes.changed_attributes(), "with its quotes it has 100 characters"
    for value in ("x" * 99, [1], (1, [2])):
        model.calls = value
        assert "model.calls" not in attributes.changed_attributes()
    for number in range(101):
        setattr(model, f"a{number:03d}", number)
    assert list(attributes.changed_attributes()) == [f"model.a{number:03d}" for number in range(100)]


@pytest.mark.parametrize(
    ("value", "is_seen"),
    [
        (3, True), ([1, 2], True), ("x" * 998, True), ("x" * 999, False), ([1] * 333, True), ([1] * 334, False),
        ([""] * 1001, False), (torch.ones(1), False), (object(), False),
    ],
)  # fmt: skip
def test_changes_of_small_plain_attributes_are_seen_and_lost_ones_named(value: Any, is_seen: bool) -> None:
    owner = SimpleNamespace(own=None)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    attributes = UnsavedAttributes({"workload": owner, "optimizer": optimizer})
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # adds attributes of its own
    owner.own = value
    changed = attributes.changed_attributes()
    assert list(changed) == (["workload.own"] if is_seen else [])
    assert attributes.lost_attributes(changed) == []
    owner.own = None
    assert attributes.lost_attributes(changed) == list(changed)
