"""A user at a terminal, who runs the real `orch` in a private home and reads its JSON and the run directory."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.trainer.agent.warm_agents import WarmAgents
from tests.warm_programs import run_orch
from trainer.protocol.logs.line_file import work_lines
from trainer.protocol.run_dir import RunDir

SMALL = [
    "cluster.nodes=2", "cluster.ranks_per_node=1", "parallel.tp=1", "recovery.backoff=0.2", "train.steps=30",
    "checkpoint.every=4", "model.layers=1",
]  # fmt: skip
"""Settings of tiny-gpt on two simulated nodes with one rank each."""
TINY = ["model.layers=1", "train.seq_len=32", "train.batch_size=4"]
"""Settings that halve a rank's time, for tests that need not interrupt a running step."""
CALM = [*SMALL, *TINY, "train.steps=16"]
"""Settings of the undisturbed run, and of runs that are compared with it."""
ONE_NODE = [*SMALL, *TINY, "cluster.nodes=1", "cluster.ranks_per_node=2"]
"""The same on one node: two processes fewer, for tests that do not depend on nodes."""
SLOW_WORKLOAD = Path(__file__).resolve().parents[1] / "fakes" / "slow_llama.py"


def warm_environment(agents: WarmAgents) -> dict[str, str]:
    """Return variables of a user whose controllers and local jobs are forks of this process."""
    return {"WARM_CHILDREN": agents.orders}


class User:
    """A user with a private state folder, folder of runs and controller."""

    def __init__(self, folder: Path, cluster: str, environment: Mapping[str, str] | None = None) -> None:
        self.folder, self.cluster = folder, cluster
        self.root = folder / "runs"
        self.root.mkdir(parents=True, exist_ok=True)
        self.environment = {
            **os.environ,
            "ORCH_HOME": str(folder / "home"),
            "ORCH_SITE_CONFIG": "",
            "XDG_CONFIG_HOME": str(folder / "config"),
            **(environment or {}),
        }

    def run(self, *words: str, timeout: float = 120, **extra: str) -> subprocess.CompletedProcess[str]:
        """Type `orch WORDS`."""
        return run_orch(words, {**self.environment, **extra}, self.folder, timeout)

    def ask(self, *words: str, timeout: float = 120) -> Any:
        """Type `orch WORDS --json` and return its data; the command must succeed."""
        done = self.run(*words, "--json", timeout=timeout)
        assert done.returncode == 0, f"orch {' '.join(words)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout)["data"]

    def submit(self, preset: str, *overrides: str, controller: bool = True) -> dict[str, Any]:
        flags = [] if controller else ["--no-controller"]
        settings = [f"cluster.root={self.root}", f"cluster.kind={self.cluster}", *overrides]
        data = self.ask("submit", preset, *settings, *flags)
        assert isinstance(data, dict)
        return data

    def slowly(self, seconds: float = 0.4) -> list[str]:
        """Return overrides with which ranks sleep in every step until `hurry`, so that a test can interrupt the run."""
        code = self.folder / "code"
        code.mkdir(exist_ok=True)
        shutil.copy(SLOW_WORKLOAD, code)
        self._slow.touch()
        args = [f"+workload.args.while_there={self._slow}", f"+workload.args.seconds={seconds}"]
        return ["workload.target=slow_llama:SlowLlama", f"workload.path=[{code}]", *args]

    def hurry(self) -> None:
        """End the sleeps of `slowly` in all runs of this user."""
        self._slow.unlink()

    @property
    def _slow(self) -> Path:
        return self.folder / "slow"

    def status(self, run: str) -> dict[str, Any]:
        return dict(self.ask("status", run)[0])

    def show(self, run: str) -> dict[str, Any]:
        return dict(self.ask("show", run))

    def wait(self, run: str, timeout: float = 240) -> int:
        """Run `orch wait` and return its exit code."""
        return self.run("wait", run, "--timeout", str(timeout), timeout=timeout + 60).returncode

    def run_dir(self, run: str) -> RunDir:
        return RunDir(self.root / run)

    def steps(self, run: str) -> list[dict[str, Any]]:
        """Return all lines of all attempts' steps.jsonl, in the order of attempts."""
        lines = []
        for attempt in self.run_dir(run).all_attempts():
            if attempt.metrics.exists():
                lines += [json.loads(line) for line in attempt.metrics.read_text().splitlines()]
        return lines

    def work(self, run: str) -> list[dict[str, Any]]:
        """Return all lines of the ranks' work logs, one for each trained step."""
        lines = []
        for attempt in self.run_dir(run).all_attempts():
            lines += work_lines(attempt)
        return lines

    def step(self, run: str) -> int:
        return max((line["step"] for line in self.steps(run)), default=0)

    def until(self, true: Callable[[], Any], seconds: float, what: str, every: float = 0.1) -> Any:
        """Wait until `true` holds; fail with `what` and the status of all runs if it does not in time.

        Less time is spent in polling than in waiting, because a poll may be expensive (a command, all processes).
        """
        end = time.monotonic() + seconds
        while (began := time.monotonic()) < end:
            found = true()
            if found:
                return found
            time.sleep(max(every, 1.5 * (time.monotonic() - began)))
        raise AssertionError(f"{what}: not within {seconds} s\n{self.run('status', '--all').stdout}")

    def processes(self, name: str) -> list[psutil.Process]:
        """Return this user's live processes whose command line (title) starts with `name`; "" for all."""
        found = []
        for process in psutil.process_iter(["cmdline", "status", "environ"]):
            words = process.info["cmdline"] or [""]
            mine = (process.info["environ"] or {}).get("ORCH_HOME") == self.environment["ORCH_HOME"]
            if mine and words[0].startswith(name) and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found

    def kill_controller(self) -> int:
        """Kill this user's controllers; return their number."""
        found = self.processes("orch-controller")
        # A child has its parent's title until it executes its own program.
        whole = [process for process in found if process.ppid() not in {one.pid for one in found}]
        return sum(1 for process in whole if not process.send_signal(signal.SIGKILL))

    def leave(self) -> None:
        """Kill all processes of this user; the controller first, because it would react to the other deaths."""
        for name in ("orch-controller", ""):
            for process in self.processes(name):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def assert_gone(family: list[psutil.Process], seconds: float = 30.0) -> None:
    """Check that these processes have ended; zombies count as ended."""
    _, left = psutil.wait_procs(family, timeout=seconds)
    alive = [process for process in left if _runs(process)]
    assert not alive, alive


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def final(user: User, run: str) -> dict[str, Any]:
    """Return the last attempt's final record, with the digest of the weights."""
    path = user.run_dir(run).all_attempts()[-1].metrics.with_name("final.json")
    return dict(json.loads(path.read_text()))


def losses(user: User, run: str) -> dict[int, float]:
    """Return the loss of each step; the last training of a step counts."""
    return {line["step"]: line["loss"] for line in user.steps(run)}


def assert_exact(user: User, disturbed: str, calm: str) -> None:
    """Check for equal losses at every step, including replayed ones, and bit-identical final weights."""
    reference = losses(user, calm)
    for line in user.steps(disturbed):
        assert line["loss"] == reference[line["step"]], f"step {line['step']} differs"
    assert set(losses(user, disturbed)) == set(reference)
    assert final(user, disturbed)["weights_digest"] == final(user, calm)["weights_digest"]


def compare(user: User, disturbed: str, calm: tuple[User, str]) -> None:
    """Apply `assert_exact` with an undisturbed run of another user."""
    other, run = calm
    (user.root / "calm").symlink_to(other.run_dir(run).path)
    assert_exact(user, disturbed, "calm")


def assert_no_step_twice_at_once(user: User, run: str) -> None:
    """Check that no two attempts trained at the same time, by the ranks' work logs."""
    spans: dict[int, tuple[float, float]] = {}
    for line in user.work(run):
        first, last = spans.get(line["attempt"], (line["time"], line["time"]))
        spans[line["attempt"]] = (min(first, line["time"]), max(last, line["time"]))
    ordered = [spans[number] for number in sorted(spans)]
    for (_, end), (start, _) in zip(ordered, ordered[1:], strict=False):
        assert end < start, f"attempts overlap: {ordered}"
