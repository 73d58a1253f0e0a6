"""A long text is cut where it may end."""

import pytest

from trainer.protocol.cut_text import cut


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("short enough to stay as it is", "short enough to stay as it is"),
        ("The first sentence is here. And the second one is longer", "The first sentence is here. ..."),
        ("a first clause of it; a second one is here, and more text", "a first clause of it; a second one is here ..."),
        (
            "words only with no end in sight that go on and on and on on",
            "words only with no end in sight that go on and ...",
        ),
        ("x" * 60, f"{'x' * 46} ..."),
        ("Short. " + "y" * 60, f"Short. {'y' * 39} ..."),
    ],
)
def test_a_text_ends_behind_a_sentence_a_clause_or_a_word(text: str, kept: str) -> None:
    assert cut(text, 46) == kept
