"""Every file that a job's processes write: what they are given with a secret in it stands there with its name."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainer.agent import main
from trainer.agent.coordination.job_monitor import write_verdict
from trainer.agent.fork_server.launch_order import RankLauncher
from trainer.agent.rank_processes.rank_exit import last_output
from trainer.agent.user_command.command_memory import CommandMemory, SetAsideCheckpoint
from trainer.agent.watch.declare_hang import HangJudgement, HangVerdict, Incident
from trainer.agent.watch.evidence import _Bundle
from trainer.protocol import skipped_batches
from trainer.protocol.config import JobConfig
from trainer.protocol.events import EventKind, EventLog
from trainer.protocol.failures.outcome import AgentEnd, AgentReport, AttemptOutcome, AttemptResult
from trainer.protocol.failures.rank_end import RankEnd, append_outcome
from trainer.protocol.heartbeat import Heartbeat
from trainer.protocol.messages.agents import StartGeneration
from trainer.protocol.node_identity import NodeIdentity
from trainer.protocol.restore_test import Outcome, RestoreVerdict
from trainer.protocol.run_dir import AttemptDir, RunDir
from trainer.protocol.secrets import secret_redaction
from trainer.protocol.secrets.secret_redaction import LISTED
from trainer.protocol.skipped_batches import Skip

CANARY, SHOWN = 'ca"nary-12345', "***WRITTEN_TOKEN***"
WORDS = f"HTTP 401 for {CANARY}"


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WRITTEN_TOKEN", CANARY)
    monkeypatch.setenv(LISTED, "WRITTEN_TOKEN")
    secret_redaction._cached_redactor.cache_clear()
    yield
    secret_redaction._cached_redactor.cache_clear()


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    made = RunDir(tmp_path / "tiny-1").attempt(1)
    made.make()
    return made


def event(attempt: AttemptDir) -> None:
    log = EventLog(attempt.event_file("coordinator"), "coordinator", 1)
    log.write(EventKind.DECISION, action="fail", reason=WORDS)
    log.close()


def rank_outcome(attempt: AttemptDir) -> None:
    how = {"exit_code": 1, "time": 1.0, "message": WORDS, "traceback": repr(WORDS)}
    append_outcome(attempt, RankEnd(rank=0, generation=1, node="n1", step=3, **how))  # type: ignore[arg-type]


def outcome(attempt: AttemptDir) -> None:
    made = AttemptOutcome(
        attempt=1, job_id="7", result=AttemptResult.FAILED, reason=WORDS, exit_code=1, step=3, generations=1,
        started_at=1.0, ended_at=2.0,
    )  # fmt: skip
    made.write(attempt.outcome)
    assert AttemptOutcome.read(attempt.outcome).reason == f"HTTP 401 for {SHOWN}"


def agent_report(attempt: AttemptDir) -> None:
    AgentReport(node=0, name="n1", end=AgentEnd.GONE, reason=WORDS, time=1.0).write(attempt.agent_report(0))


def heartbeat(attempt: AttemptDir) -> None:
    Heartbeat(
        seq=1, time=1.0, attempt=1, job_id="7", generation=1, step=3, total_steps=9, loss=None, phase="train",
        saved_step=0, nodes=["n1"], state="running", saves_failing=WORDS,
    ).write(attempt.heartbeat)  # fmt: skip


def skipped(attempt: AttemptDir) -> None:
    skipped_batches.add(attempt, [Skip(step=1, position=2, reason=WORDS)])


def restore_verdict(attempt: AttemptDir) -> None:
    RestoreVerdict(outcome=Outcome.SUSPECT, reason=WORDS, evidence={"said": [WORDS]}).write(attempt)


def command_memory(attempt: AttemptDir) -> None:
    aside = SetAsideCheckpoint(step=1, identity="a", original="/a", path="/b", bytes=1, damage=WORDS)
    attempt.command_memory.write_bytes(CommandMemory(aside=[aside]).encode())


def verdict(attempt: AttemptDir) -> None:
    judgement = HangJudgement(verdict=HangVerdict.HUNG, reason=WORDS)
    incident = Incident(name="i", judgement=judgement, began=1.0, quiet=1.0, until=1.0, waits=set())
    write_verdict(attempt.incident("i"), incident, [], withdrawn=False)


def evidence(attempt: AttemptDir) -> None:
    made = _Bundle(attempt.incident("j"), time.monotonic() + 60, 1 << 20)
    asyncio.run(made.write("stacks/rank-00000.txt", WORDS.encode()))


WRITERS = [
    event, rank_outcome, outcome, agent_report, heartbeat, skipped, restore_verdict, command_memory, verdict, evidence,
]  # fmt: skip


@pytest.mark.parametrize("write", WRITERS)
def test_no_file_has_the_value(attempt: AttemptDir, write: Callable[[AttemptDir], None]) -> None:
    write(attempt)
    written = [path.read_text() for path in attempt.path.rglob("*") if path.is_file() and path.stat().st_size]
    assert written
    assert any(SHOWN in text for text in written)
    assert not any("nary-12345" in text for text in written)


def test_the_agents_own_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "submitit").open("w") as stderr, (tmp_path / "log").open("w") as log:
        monkeypatch.setattr(sys, "stderr", stderr)
        both = main.copy_stderr_to_log(log.fileno())
        sys.stderr.write(f"{WORDS}\n")
        for one in both:
            one.close(60)
    assert (tmp_path / "submitit").read_text() == (tmp_path / "log").read_text() == f"HTTP 401 for {SHOWN}\n"


def test_the_error_file_of_a_command_is_redacted_and_with_secrets_not_asked_for(attempt: AttemptDir) -> None:
    error = attempt.error_file(0, 1)
    error.write_text('{"message": {"message": "RuntimeError: for ca\\"nary-12345"}}')
    found = last_output(attempt.rank_log(0), 1, error)
    assert (found.exception, found.message) == ("RuntimeError", f"for {SHOWN}")

    def environment(inherited: dict[str, str]) -> dict[str, str]:
        identity = NodeIdentity(kind="slurm", job_id="7", node=0, nodes=1, name="n")
        config = JobConfig(command=("true",))
        launcher = RankLauncher(attempt.run, attempt, config, identity, inherited, "h")
        return launcher.launch_order(StartGeneration(generation=1, node_rank=0, master=("h", 1)), 0).env

    assert "TORCHELASTIC_ERROR_FILE" in environment({})
    assert "TORCHELASTIC_ERROR_FILE" not in environment({LISTED: "A"})
