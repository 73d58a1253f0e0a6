"""What is reported of a rank that has ended: its last words too, although they go to its log through a pipe."""

import asyncio
import os
import threading

import pytest

from trainer.agent.processes.log_pipes import LogPipes
from trainer.agent.rank_processes.rank_exit import complete_end
from trainer.protocol.failures.rank_end import RankEnd
from trainer.protocol.logs.log_rotation import LogFile
from trainer.protocol.run_dir import AttemptDir

ENDED = RankEnd(rank=0, generation=1, node="n", exit_code=1, step=None)


def test_words_that_are_still_on_their_way_to_the_log_are_waited_for(tmp_path, monkeypatch):
    attempt, write, waited_for = AttemptDir(tmp_path / "001"), LogFile.write, threading.Event()
    attempt.make()

    class Pipes(LogPipes):
        def settle(self, path, seconds):
            waited_for.set()
            return super().settle(path, seconds)

    monkeypatch.setattr(LogFile, "write", lambda file, data: (waited_for.wait(60), write(file, data)))
    pipes = Pipes()
    os.write(pipes.descriptor(attempt.rank_log(0)), b"Traceback (most recent call last):\n  ...\nMyError: last words\n")
    report = asyncio.run(complete_end(attempt, ENDED, None, command=True, logs=pipes))
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
def test_only_what_torch_raises_follows_from_a_lost_peer(tmp_path, raised, follows):
    attempt = AttemptDir(tmp_path / "001")
    attempt.make()
    attempt.rank_log(0).write_text(f"Traceback (most recent call last):\n  ...\n{raised}\n")
    pipes = LogPipes()
    report = asyncio.run(complete_end(attempt, ENDED, None, command=True, logs=pipes))
    pipes.close(10)
    assert report.exception == raised.partition(":")[0].rpartition(".")[2]
    assert report.secondary is follows
