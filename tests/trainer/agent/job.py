"""A local job for tests: real agents as subprocesses, as submitit would start them, with the test as controller."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from checkpointing.storage.durable import dump_line, write_durably
from trainer.protocol.events import Event, EventKind, read_events
from trainer.protocol.failures.outcome import AttemptOutcome
from trainer.protocol.launch_token import LaunchToken
from trainer.protocol.node_identity import local_job_id
from trainer.protocol.run_dir import RunDir


class AgentStarter(Protocol):
    """Starts agents in another way than as programs."""

    def start(self, run_dir: Path, environ: Mapping[str, str], log: int) -> "subprocess.Popen[bytes]": ...


_AGENT = "import sys; from trainer.agent.main import run_agent; run_agent(sys.argv[1], sys.argv[2])"


class LocalJob:
    """One attempt of one run on simulated nodes."""

    def __init__(
        self,
        folder: Path,
        *,
        nodes: int = 2,
        ranks: int = 2,
        spares: int = 0,
        starter: AgentStarter | None = None,
        **config: Any,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.run = RunDir(folder / "run-1")
        self.run.make()
        self.attempt = self.run.attempt(1)
        self.attempt.make()
        shape = {"nodes": nodes, "spare_nodes": spares, "ranks_per_node": ranks}
        cluster = {"kind": "local", **shape, **config.pop("cluster", {})}
        write_durably(self.run.config, dump_line({"cluster": cluster, **config}).encode())
        self.nodes, self._starter = nodes + spares, starter
        self.agents: list[subprocess.Popen[bytes]] = []
        # Stands for submitit's process, whose end is the end of the job.
        self.job = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env={})
        self.job_id = local_job_id(self.job.pid)
        self._began = int(_stat(self.job.pid)[_STARTED])

    def go(self, **changes: Any) -> None:
        fields = {"attempt": 1, "epoch": 1, "job_id": self.job_id, "nonce": "0badcafe"}
        LaunchToken(**{**fields, **changes}).write(self.attempt.go)

    def start(
        self, *, environ: dict[str, str] | None = None, local: bool = True, within: Sequence[Sequence[str]] = ()
    ) -> "LocalJob":
        """`within`: for each node, the words that its agent is started by."""
        for node in range(self.nodes):
            place = {
                "SUBMITIT_LOCAL_JOB_ID": str(self.job.pid),
                "SUBMITIT_LOCAL_GLOBALID": str(node),
                "SUBMITIT_LOCAL_NTASKS": str(self.nodes),
            }
            mark = {"ORCH_TEST_RUN": str(self.run.path.parent)}
            environment = {**os.environ, **mark, **(environ or {}), **(place if local else {})}
            with (self.attempt.submission / f"{node}.err").open("ab") as log:
                self.agents.append(self._agent(within[node] if within else (), environment, log))
        return self

    def _agent(self, within: Sequence[str], environment: Mapping[str, str], log: BinaryIO) -> "subprocess.Popen[bytes]":
        if self._starter is not None and not within:
            return self._starter.start(self.run.path, environment, log.fileno())
        command = [*within, sys.executable, "-P", "-c", _AGENT, str(self.run.path), "1"]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def wait(self, seconds: float = 30.0) -> list[int]:
        """Exit codes of all agents."""
        give_up = time.monotonic() + seconds
        try:
            return [agent.wait(max(0.01, give_up - time.monotonic())) for agent in self.agents]
        except subprocess.TimeoutExpired:
            raise AssertionError(self.story()) from None

    def ends(self, *codes: int, seconds: float = 30.0) -> "LocalJob":
        """Start the agents if they are not running, permit training, and expect these exit codes."""
        if not self.agents:
            self.start()
        self.go()
        assert self.wait(seconds) == list(codes), self.story()
        return self

    def outcome(self) -> AttemptOutcome:
        return AttemptOutcome.read(self.attempt.outcome)

    def events(self, kind: EventKind | None = None) -> list[Event]:
        found = [event for path in self.attempt.events.glob("*.jsonl") for event in read_events(path)[0]]
        found.sort(key=lambda event: event.time)
        return [event for event in found if kind is None or event.kind == kind]

    def notes(self) -> list[dict[str, Any]]:
        """What the ranks wrote into notes.jsonl, one object per line."""
        path = self.run.path / "notes.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def processes(self) -> list[int]:
        """Pids of every live process of this job, whoever its parent is by now: agents, fork servers, ranks."""
        return list(processes_of(self.run.path.parent, {agent.pid for agent in self.agents}, self._began))

    def story(self) -> str:
        """All that is known, for a failed test."""
        lines = [
            f"{event.time:.3f} {event.source} g{event.generation} {event.kind} {event.data}" for event in self.events()
        ]
        logs = [*self.attempt.logs.glob("*"), *self.attempt.submission.glob("*.err")]
        texts = [f"--- {path.name}\n{path.read_text()}" for path in sorted(logs)]
        return "\n".join([*lines, *texts])

    def close(self) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                agent.kill()
            agent.wait(10)
        self.job.stdin.close()
        self.job.wait(10)


def until(condition: Callable[[], Any], seconds: float = 20.0, story: Callable[[], str] = str) -> Any:
    """Look until `condition` gives something true, ever more rarely, as looking takes time; returns it."""
    began = time.monotonic()
    while (waited := time.monotonic() - began) < seconds:
        if found := condition():
            return found
        time.sleep(min(0.01 + waited / 20, 0.2))
    raise AssertionError(f"waited {seconds} s in vain\n{story()}")


def processes_of(folder: Path, sessions: set[int], began: int = 0) -> Iterator[int]:
    """Pids of live processes of these sessions, and of those that left them and carry the mark of the test's folder.

    The mark is looked for in processes that started at this clock tick or later. (A process that gives itself a title
    has no readable environment any more.)
    """
    mark = f"ORCH_TEST_RUN={folder}".encode()
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getpid()):
        try:
            fields = _stat(pid)
            if fields[_STATE] in "ZX":
                continue
            is_marked = int(fields[_STARTED]) >= began and (
                mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            )
        except OSError:
            continue
        if is_marked or int(fields[_SESSION]) in sessions:
            yield pid


_STATE, _SESSION, _STARTED = 0, 3, 19
"""Places behind the name of a program in /proc/PID/stat."""


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
