"""Crash reports: a full disk or an unprintable message does not keep the outcome from the agent."""

from types import SimpleNamespace

import pytest
from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

from trainer.protocol.failures.outcome import ExitCode
from trainer.worker import crash_report
from trainer.worker.reporting.flight_recorder import is_secondary_failure
from trainer.worker.startup.rendezvous import PeerLost

pytestmark = pytest.mark.multi

FULL = "/dev/full"


def fill_up(run, *, outcomes: bool) -> None:
    """Send rank 0's telemetry to a full device and outcomes to a folder that cannot be created."""
    for path in (
        run.attempt.work_log("n0"), run.attempt.metrics, run.attempt.rank_events("n0"), run.attempt.rank_log(0),
    ):  # fmt: skip
        path.symlink_to(FULL)
    if outcomes:
        run.attempt.outcomes.rmdir()
        run.attempt.outcomes.touch()


def test_lost_telemetry_does_not_end_the_training(make_run):
    run = make_run(1, train={"steps": 3}, checkpoint={"every": 0}, drill={"events": [{"kind": "slow-rank", "step": 1}]})
    fill_up(run, outcomes=False)
    answer = run.train()
    # Only events of the checkpointer are retried, and reported as the cause if the run ends without them.
    assert answer["steps"] == [3]
    assert answer["saved"] == [3]
    assert "[Errno 28]" in answer["last"][0]["message"]
    assert run.final()["step"] == 3


REPORTED = ("exit_code", "exception", "secondary", "step", "position", "message")


def test_the_agent_hears_the_cause_when_no_file_can_be_written(make_run):
    run = make_run(1, drill={"events": [{"kind": "raise", "step": 2}]})
    fill_up(run, outcomes=True)
    answer = run.train()
    assert answer["codes"] == [ExitCode.ERROR]
    (last,) = answer["last"]
    assert {key: value for key, value in last.items() if key in REPORTED} == {
        "exit_code": 1, "exception": "DrillError", "secondary": False, "step": 2, "position": None,
        "message": "drill: raised on rank 0 after step 2",
    }  # fmt: skip


def test_a_finish_that_cannot_be_written_is_still_a_finish(make_run):
    run = make_run(1, train={"steps": 2})
    run.attempt.outcomes.rmdir()
    run.attempt.outcomes.touch()
    answer = run.train()
    assert answer["codes"] == [0]
    assert (answer["last"][0]["exit_code"], answer["last"][0]["exception"]) == (0, None)


def test_every_good_end_is_told_and_written(make_run):
    run = make_run(1, train={"steps": 30}, checkpoint={"every": 0})
    stop = {"do": "ask", "reason": "CANCEL", "rank": 0, "of_rank": 0, "at_step": 1}
    assert [run.train([stop])["last"][0]["exit_code"], run.train()["last"][0]["exit_code"]] == [76, 0]
    outcomes = [run.outcome(0, generation).exit_code for generation in (1, 2)]
    assert outcomes == [76, 0]


@pytest.mark.parametrize(
    ("what", "name", "message"),
    [
        ("class Mine(BaseException): pass", "Mine", "gone"),
        ("class Mine(Exception):\n    def __str__(self): raise ValueError", "Mine", "<exception str() failed>"),
    ],
)
def test_every_exception_is_told(make_run, tmp_path, what, name, message):
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / "odd_workload.py").write_text(
        f"{what}\nclass Odd:\n    def __init__(self, config):\n        raise Mine('gone')\n"
    )
    run = make_run(1, name="run", workload={"target": "odd_workload:Odd", "path": [str(folder)]})
    assert run.train()["codes"] == [ExitCode.ERROR]
    outcome = run.outcome(0, 1)
    assert (outcome.exception, outcome.message) == (name, message)


def test_a_part_of_torch_that_is_away_is_named_as_missing(make_run, tmp_path):
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / "odd_workload.py").write_text(
        "import sys, torch\nclass Odd:\n    def __init__(self, config):\n        torch.utils.__path__ = []\n"
        "        for name in [one for one in sys.modules if one.startswith('torch.utils.serialization')]:\n"
        "            del sys.modules[name]\n        torch.serialization.get_crc32_options()\n"
    )
    run = make_run(1, name="run", workload={"target": "odd_workload:Odd", "path": [str(folder)]})
    run.train()
    assert "part of the installation is missing (environment " in run.outcome(0, 1).message


def test_words_that_are_no_unicode_reach_the_agent_and_the_file(make_run, tmp_path):
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / "odd_workload.py").write_text(
        "class Odd:\n    def __init__(self, config):\n        raise RuntimeError('no file caf\\udce9')\n"
    )
    run = make_run(1, name="run", workload={"target": "odd_workload:Odd", "path": [str(folder)]})
    assert run.train()["last"][0]["message"] == "no file caf\\udce9"
    assert run.outcome(0, 1).message == "no file caf\\udce9"


def test_a_message_of_any_length_leaves_room_on_the_disk(monkeypatch):
    spec = SimpleNamespace(rank=0, generation=1, node_name="n0")
    written: list[str] = []
    monkeypatch.setattr(crash_report, "write_stderr", written.append)
    monkeypatch.setattr(crash_report, "dump", lambda *_: None)
    last = crash_report.failed_outcome(spec, SimpleNamespace(read=lambda: None), ValueError("begin" + "x" * 50_000_000))
    assert len(last.message) < 10_000
    assert len(last.traceback) + len(written[0]) < 1_000_000
    assert last.message.startswith("beginx")
    assert "49992005 characters left out" in last.message


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5"),
        RuntimeError("[pair.cc:547] Read error [127.0.0.1]:4433: Connection reset by peer"),
        RuntimeError("[unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete"),
        RuntimeError("Gloo connectFullMesh failed with [pair.cc:144] no error"),
        DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed."),
        DistNetworkError("The client socket has failed to connect to any network address of (n1, 2)."),
        DistStoreError("Timed out after 301 seconds waiting for clients. 3/4 clients joined."),
        DistBackendError("NCCL error: remote process exited or there was a network error, NCCL version 2.27"),
        PeerLost("the agent went away"),
    ],
)
def test_secondary_failures(error):
    assert is_secondary_failure(error)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError("Connection reset by peer"),
        ValueError("Connection closed by peer"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        DistBackendError("NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)"),
        OSError(28, "No space left on device"),
    ],
)
def test_causes(error):
    assert not is_secondary_failure(error)
