"""When a difference between steps is a verdict on a checkpoint, and what else may be its cause."""

from typing import Any

import pytest

from trainer.worker.restore_test.comparability import Conditions, why_no_verdict, why_not_compared

EQUAL = Conditions(same_layout=True, repeats=True, built_in=True, promises_equality=True)


def conditions(**over: Any) -> Conditions:
    known = {"same_layout": True, "repeats": True, "built_in": True, "promises_equality": True}
    return Conditions(**{**known, **over})


def test_where_all_is_equal_every_bit_counts() -> None:
    assert EQUAL.exact
    assert why_not_compared(EQUAL) == why_no_verdict(EQUAL) == ""


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ({"differs": ("code.user", "env.torch")}, "code.user, env.torch differ"),
        ({"software": {"torch": ["2.12", "2.13"]}}, "other software: torch"),
        ({"software": {"text_hash": [None, "0a"]}}, "other software: text_hash"),
        ({"keeps_gradients": True}, "gradients outlive a step, as those that an optimizer of the workload's own keeps"),
        ({"promises_equality": False, "built_in": False}, "does not promise equal steps"),
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


def test_edited_code_and_other_random_numbers_are_not_compared() -> None:
    assert "code.user" in why_not_compared(conditions(differs=("code.user",)))
    assert "random numbers" in why_not_compared(conditions(same_layout=False, drawn=True))
    assert why_not_compared(conditions(drawn=True)) == ""
