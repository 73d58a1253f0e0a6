"""The last words of an aborted process, as its log has them."""

import pytest

from trainer.agent.rank_processes.rank_exit import last_cpp_exception
from trainer.protocol.messages.ranks import generation_mark

CRY = (
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
    "  what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 24 vs 8. Is there a mismatch?\n"
)


@pytest.fixture
def log(tmp_path):
    return tmp_path / "rank-00001.log"


def test_the_text_of_the_exception_is_told(log):
    log.write_text(f"{generation_mark(2)}\nstep 1\n{CRY}more\n")
    assert last_cpp_exception(log, 2) == (
        "[enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 24 vs 8. Is there a mismatch?"
    )


def test_an_older_generation_is_not_taken_for_this_one(log):
    log.write_text(f"{generation_mark(1)}\n{CRY}{generation_mark(2)}\nstep 1\n")
    assert last_cpp_exception(log, 2) is None


def test_of_a_long_log_the_end_is_read(log):
    log.write_bytes(b"\xff\xfe noise\n" * 100_000 + CRY.encode())
    assert last_cpp_exception(log, 1) is not None
    log.write_text(CRY + "later\n" * 100_000)
    assert last_cpp_exception(log, 1) is None


def test_without_a_log_there_is_nothing_to_tell(log):
    assert last_cpp_exception(log, 1) is None
