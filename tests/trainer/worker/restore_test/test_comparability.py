"""When a difference between steps is a verdict on a checkpoint, and what else may be its cause."""

from dataclasses import replace
from typing import Any

import pytest

from trainer.worker.restore_test.comparability import Conditions, why_no_verdict, why_not_compared

EQUAL = Conditions(same_layout=True, repeats=True, built_in=True, promises_equality=False, has_agreed=False)


def conditions(**over: Any) -> Conditions:
    return replace(EQUAL, **over)


def test_where_all_is_equal_every_bit_counts() -> None:
    assert EQUAL.exact
    assert why_not_compared(EQUAL) == why_no_verdict(EQUAL) == ""


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ({"differs": ("code.user", "env.torch")}, "code.user, env.torch differ"),
        ({"software": {"torch": ["2.12", "2.13"]}}, "other software: torch"),
        ({"software": {"text_hash": [None, "0a"]}}, "other software: text_hash"),
        ({"built_in": False}, "no fault was found in the checkpoint: the steps of this workload depend on something"),
        ({"built_in": False, "promises_equality": True}, "no fault was found in the checkpoint"),
        ({"built_in": False, "has_agreed": True}, "no fault was found in the checkpoint"),
        ({"built_in": False, "differs": ("env.torch",)}, "env.torch differ"),
        ({"built_in": False, "software": {"torch": ["2.12", "2.13"]}}, "other software: torch"),
        ({"same_layout": False, "dtype": "bfloat16"}, "no bound is known for bfloat16"),
        ({"same_layout": False, "experts": 4}, "no bound is known for models with experts"),
        ({"same_layout": False, "built_in": False}, "no bound is known for this model"),
        ({"repeats": False, "dtype": "float16"}, "no bound is known for float16"),
        ({"software": {"threads": [1, 2]}, "dtype": "bfloat16"}, "no bound is known"),
    ],
)
def test_anything_else_that_differs_is_a_cause_of_its_own(over: dict[str, Any], words: str) -> None:
    assert words in why_no_verdict(conditions(**over))


@pytest.mark.parametrize(
    "over",
    [
        {"same_layout": False},
        {"software": {"threads": [1, 2], "cpu": ["a", "b"]}},
        {"software": {"cpu_model": ["a", "b"], "kernel_settings": ["", "MKL_CBWR=AVX2"]}},
    ],
)
def test_the_bound_that_was_measured_holds_for_dense_float32(over: dict[str, Any]) -> None:
    assert not conditions(**over).exact
    assert why_no_verdict(conditions(**over)) == ""


def test_a_workload_that_promises_equal_steps_is_taken_at_its_word_once_it_has_kept_it() -> None:
    assert why_no_verdict(conditions(built_in=False, promises_equality=True, has_agreed=True)) == ""


def test_edited_code_and_other_random_numbers_are_not_compared() -> None:
    assert "code.user" in why_not_compared(conditions(differs=("code.user",)))
    assert "random numbers" in why_not_compared(conditions(same_layout=False, drawn=True))
    assert why_not_compared(conditions(drawn=True)) == ""
