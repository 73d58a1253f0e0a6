"""Programs that Linux could not start are refused at submit; the longest that it can start are accepted."""

from orchestrator.config.run_config import RunConfig
from orchestrator.config.validation import program_size_complaints
from trainer.protocol.program_limits import MAX_STRING_BYTES


def complained(**fields):
    return [what for what, hint in program_size_complaints(RunConfig(**fields)) if hint]


def test_the_longest_argument_and_variable_that_linux_starts_are_accepted():
    value = "x" * (MAX_STRING_BYTES - len("A="))
    assert complained(command=("python", "y" * MAX_STRING_BYTES), env={"A": value}) == []


def test_longer_ones_are_refused_by_their_key():
    assert complained(env={"A": "x" * 131_072}) == ["env.A: is 3 bytes longer than the 131071 that Linux allows"]
    assert complained(command=("python", "-c", "é" * 65_536)) == [
        "command: word 3 is 1 bytes longer than the 131071 that Linux allows"
    ]


def test_many_words_that_are_too_long_together_are_refused():
    words = ("python", *["z" * 100_000] * 63)
    assert complained(command=words) == [
        "command and env: have 6300582 bytes together, but Linux allows 6291456 for a program"
    ]
