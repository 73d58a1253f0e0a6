"""What is reported of a rank that has ended: its last words too, although they go to its log through a pipe."""

import asyncio
import json
import os
import threading

import pytest

from trainer.agent.processes.log_pipes import LogPipes
from trainer.agent.rank_processes.local_ranks import LocalRanks
from trainer.agent.rank_processes.rank_exit import LINES, WIDTH, LastOutput, complete_end, last_output
from trainer.protocol.failures.rank_end import RankEnd
from trainer.protocol.logs.log_rotation import LogFile
from trainer.protocol.messages.ranks import generation_mark
from trainer.protocol.run_dir import AttemptDir

ENDED = RankEnd(rank=0, generation=1, node="n", exit_code=1, step=None)


@pytest.fixture
def ranks():
    found = LocalRanks(1, range(1))
    yield found
    found.close()
    found.by_rank[0].close_theirs()


def test_words_that_are_still_on_their_way_to_the_log_are_waited_for(tmp_path, monkeypatch, ranks):
    attempt, write, waited_for = AttemptDir(tmp_path / "001"), LogFile.write, threading.Event()
    attempt.make()

    class Pipes(LogPipes):
        def settle(self, path, seconds):
            waited_for.set()
            return super().settle(path, seconds)

    monkeypatch.setattr(LogFile, "write", lambda file, data: (waited_for.wait(60), write(file, data)))
    pipes = Pipes()
    os.write(pipes.descriptor(attempt.rank_log(0)), b"Traceback (most recent call last):\n  ...\nMyError: last words\n")
    report = asyncio.run(complete_end(attempt, ENDED, ranks, command=True, logs=pipes))
    waited_for.set()
    pipes.close(10)
    assert (report.exception, report.message) == ("MyError", "last words")


@pytest.mark.parametrize(
    ("raised", "follows"),
    [
        ("torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error", True),
        ("RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.7]:5", True),
        ("ConnectionRefusedError: [Errno 111] Connection refused", False),
        ("requests.exceptions.ConnectionError: ('Connection aborted.', Connection reset by peer)", False),
    ],
)
def test_only_what_torch_raises_follows_from_a_lost_peer(tmp_path, raised, follows, ranks):
    attempt = AttemptDir(tmp_path / "001")
    attempt.make()
    attempt.rank_log(0).write_text(f"Traceback (most recent call last):\n  ...\n{raised}\n")
    pipes = LogPipes()
    report = asyncio.run(complete_end(attempt, ENDED, ranks, command=True, logs=pipes))
    pipes.close(10)
    assert report.exception == raised.partition(":")[0].rpartition(".")[2]
    assert report.secondary is follows


TRACE = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    run()\n'


@pytest.fixture
def said(tmp_path):
    def read(text: str, generation: int = 2) -> LastOutput:
        log = tmp_path / "rank.log"
        before = f"{generation_mark(1)}\n{TRACE}KeyError: 'of the generation before'\n"
        log.write_text(f"{before}{generation_mark(2)}\n{text}")
        return last_output(log, generation, tmp_path / "error.json")

    return read


@pytest.mark.parametrize(
    ("text", "exception", "message"),
    [
        (f"{TRACE}ValueError: bad: worse\n", "ValueError", "bad: worse"),
        (f"{TRACE}safetensors_rust.SafetensorError: header\nmore of it\n", "SafetensorError", "header"),
        (f"{TRACE}KeyboardInterrupt\n", "KeyboardInterrupt", None),
        (f"{TRACE}KeyError: 1\n\nDuring handling of the above exception, another exception occurred:\n\n"
         f"{TRACE}TypeError: 2\nlast words\n", "TypeError", "2"),
        ("".join(f"[rank3]: {line}\n" for line in f"{TRACE}OSError: no".splitlines()), "OSError", "no"),
        ("  File \"train.py\", line 3\n    x =\n       ^\nSyntaxError: invalid syntax\n", "SyntaxError",
         "invalid syntax"),
        (f"{TRACE}cut", "cut", None),
        (TRACE, None, None),
        ("all well\n", None, None),
        ("", None, None),
    ],
)  # fmt: skip
def test_what_was_raised_is_the_end_of_the_last_traceback(said, text, exception, message):
    found = said(text)
    assert (found.exception, found.message) == (exception, message)
    assert found.written == len(text)


def test_lines_are_those_of_a_terminal_without_its_escapes(said):
    text = (
        "\x1b[31mred\x1b[0m\n\n 1%|#   |\r50%|##  |\r99%|### |\r\nbell\x07 tab\there\x1b]0;title\x07\n\x9b2J\n"
        + "x" * 999
    )
    assert said(text).lines == ("red", "99%|### |", "bell tab here", "2J", "x" * WIDTH)


def test_only_the_last_lines_are_kept(said):
    assert said("\n".join(map(str, range(100)))).lines == tuple(str(number) for number in range(100 - LINES, 100))


def test_an_error_file_of_record_says_more_than_the_log(said, tmp_path):
    told = {"message": {"message": "torch.OutOfMemoryError: of memory\nmore", "extraInfo": {"timestamp": "1"}}}
    (tmp_path / "error.json").write_text(json.dumps(told))
    found = said(f"{TRACE}ValueError: printed by the way\n")
    assert (found.exception, found.message) == ("OutOfMemoryError", "of memory")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"message": 7}', '{"message": {}}'])
def test_an_error_file_that_says_nothing_is_passed_over(said, tmp_path, content):
    (tmp_path / "error.json").write_text(content)
    assert said(f"{TRACE}ValueError: x\n").exception == "ValueError"


def test_a_log_that_is_not_there_says_nothing(tmp_path):
    assert last_output(tmp_path / "none", 1, tmp_path / "none.json") == LastOutput()


def test_of_a_crash_in_cpp_the_exception_of_this_generation_is_told(said, tmp_path):
    cause = "[enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 24 vs 8. Is there a mismatch?"
    cry = f"terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  {cause}\n"
    assert said(f"noise\n{cry}more\n").uncaught == cause
    assert said(f"{cry}{generation_mark(3)}\nstep 1\n", 3).uncaught is None
    assert said("step 1\n" * 200_000 + cry).uncaught == cause
    assert said(cry + "step 1\n" * 200_000).uncaught is None
