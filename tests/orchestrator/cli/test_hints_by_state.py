"""What verbs offer next, in every state of a run: each command is typed, and none is refused for that state."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpointing.storage.durable import dump_line
from orchestrator.config.compose import compose
from orchestrator.controller import service as real_service
from orchestrator.registry.records import Checkpoint, NewRun, RestoreTest
from orchestrator.registry.store import Store
from orchestrator.run_dirs.run_folder import ensure_run_dir
from orchestrator.run_view import RunView
from orchestrator.states import AttemptState, RunState, Trust
from orchestrator.submission import resume_request
from orchestrator.submission.run_identity import code, environment
from tests.orchestrator.cli.conftest import Patch, Type, Typed
from tests.orchestrator.cli.printed_commands import commands_in, is_name, why_not_typed
from trainer.protocol.events import EventKind, EventLog
from trainer.protocol.failures.outcome import Failure, FailureKind
from trainer.protocol.run_dir import RunDir

STEP = 20
KILLED = Failure(kind=FailureKind.RANK_KILLED, reason="rank 1 on n1 was killed by SIGKILL", rank=1, node="n1")
REFUSED = Failure(kind=FailureKind.SUBMIT_REJECTED, reason="Slurm refused the job: invalid partition")
NOT_STARTED = Failure(kind=FailureKind.LAUNCH_FAILED, reason="job 41 ended as FAILED, before its agents started")
ENDS_WITH = {
    RunState.RECOVERING: KILLED, RunState.FAILED: KILLED, RunState.HELD: REFUSED,
    RunState.CANCELLED: Failure(kind=FailureKind.CANCELLED, reason="cancelled by `orch cancel`"),
}  # fmt: skip
TYPED = (
    "", "status {run}", "show {run}", "wait {run} --timeout 0", "wait {run} --timeout 0 --follow", "events {run}",
    "events {run} -f", "events {run} --since 2999-01-01", "logs {run}", "logs {run} -f", "logs {run} --path",
    "logs {run} --rank first-error", "logs {run} --rank 7", "logs {run} --node 5", "logs {run} --attempt 9",
    "logs {run} --attempt 1 --rank 7", "logs {run} --controller", "top {run}", "attach {run} --stack", "attach {run}",
    "save {run}", "save {run} --no-wait", "cancel {run}", "resume {run}", "resume {run} optimizer.lr=0.5",
    "resume {run} train.steps=9", "drill {run} kill-rank", "drill {run} nan", "drill {run} full-disk",
    "ckpt ls {run}", "ckpt verify {run}", "ckpt verify {run}@7", "ckpt pin {run}@7", "ckpt unpin {run}@20",
    "ckpt gc {run}", "ckpt du {run}", "ckpt diff {run}@7 {run}@8", "ckpt export {run}@7 somewhere",
    "ckpt restore-test {run}@7", "nodes ls", "nodes release n9", "restore-tests history {run}", "restore-tests ls",
    "restore-tests due", "config diff {run} tiny-gpt", "submit --from {run}@7", "submit", "controller status",
)  # fmt: skip
ONLY_UNDERSTOOD = (
    "submit", "demo", "drill --demo", "doctor", "controller", "ckpt restore-test", "ckpt verify", "ckpt export",
    "ckpt import", "db rebuild", "data",
)  # fmt: skip
"""Commands that start something, or need files that no run of this test has."""
FINE = {0, 8, 10, 124, 130}
"""Done, how a run has ended, not within the time, and what would go on until Ctrl-C."""


class World:
    def __init__(self, root: Path, store: Store, identity: dict[str, Any], data: dict[str, Any]) -> None:
        self.root, self.store, self.identity, self.data = root, store, identity, data
        lease = store.take_lease("login1:7:7", time.time(), 3600.0)
        assert lease is not None
        self.epoch = lease.epoch
        store.note_tick(lease, time.time())

    def run(self, state: RunState, *, failure: Failure | None = None, command: bool = False, test_of: str = "") -> str:
        return self.store.together(lambda: self._run(state, failure, command, test_of))

    def _run(self, state: RunState, failure: Failure | None, command: bool, test_of: str) -> str:
        order = {"run": test_of, "checkpoint": f"step-{STEP:08d}.001-0123abcd", "step": STEP, "layout": "same"}
        digest = self.store.put_config(self.data)
        new = NewRun(
            slug="tiny", cluster="local", root=self.root, config_digest=digest, total_steps=0 if command else 200,
            identity={**self.identity, **({"restore_test": order} if test_of else {})},
        )  # fmt: skip
        run, attempt = self.store.create_run(new, now=time.time(), nonce="0123abcd")
        if test_of:
            self.store.put_restore_test(RestoreTest(test=run.name, begun_at=1.0, **order))
        if state is not RunState.CREATED:
            ensure_run_dir(run, attempt, self.data)
        self._advance(run.name, state, failure or ENDS_WITH.get(state))
        return run.name

    def _advance(self, run: str, state: RunState, failure: Failure | None) -> None:
        stamp = {"epoch": self.epoch, "now": time.time()}
        if state is RunState.CREATED:
            return
        self.store.move_attempt(run, 1, AttemptState.SUBMITTED, "job 41 is queued", **stamp, job_id="41")
        if state is RunState.QUEUED:
            self.store.move_run(run, state, "job 41 is queued", **stamp)
            return
        started = failure is None or failure.kind is not FailureKind.SUBMIT_REJECTED
        if started and failure != NOT_STARTED:
            self.store.move_attempt(
                run, 1, AttemptState.RUNNING, "runs", **stamp, nodes=("n1",), started_at=time.time()
            )
            self._train(RunDir(self.root / run), failure, run)
        if state is not RunState.RUNNING:
            self.store.move_attempt(
                run, 1, AttemptState.ENDED, "it ended", **stamp, ended_at=time.time(), last_step=120,
                failure=failure.to_json() if failure else None,
            )  # fmt: skip
        self.store.move_run(run, state, failure.reason if failure else "all steps are trained", **stamp, step=120)

    def _train(self, folder: RunDir, failure: Failure | None, run: str) -> None:
        if not folder.path.exists():
            return
        place = folder.attempt(1)
        beat = {"seq": 1, "time": time.time(), "attempt": 1, "generation": 1, "step": 120, "nodes": ["n1"]}
        place.heartbeat.write_text(dump_line({**beat, "state": "running", "job_id": "41"}))
        place.agent_log(0).write_text("agent\n")
        place.rank_log(0).write_text("rank 0\n")
        log = EventLog(place.event_file("coordinator"), "coordinator", 1)
        log.generation = 1
        if failure is not None and failure.rank is not None:
            log.write(EventKind.GENERATION_ENDED, reason=failure.reason, step=120, failure=failure.to_json())
        log.close()
        name = f"step-{STEP:08d}.001-0123abcd"
        saved = Checkpoint(
            run=run, name=name, step=STEP, attempt=1, trust=Trust.COMMITTED, bytes=1, committed_at=time.time(),
            path=str(folder.checkpoints / name),
        )  # fmt: skip
        self.store.put_checkpoint(saved, epoch=self.epoch)


@pytest.fixture(scope="module")
def identity() -> dict[str, Any]:
    return {"code": code(compose("tiny-gpt", []).config), "env": environment("local")}


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return compose("tiny-gpt", ["cluster.kind=local"]).data


@pytest.fixture
def world(
    home: Path, tmp_path: Path, identity: dict[str, Any], config: dict[str, Any], monkeypatch: Patch
) -> Iterator[World]:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    root = tmp_path / "runs"
    root.mkdir()
    data = {
        **config,
        "cluster": {**config["cluster"], "root": str(root)},
        "data": {**config["data"], "path": str(tmp_path)},
    }
    monkeypatch.setattr(resume_request, "environment", lambda kind: identity["env"])
    monkeypatch.setattr(real_service, "ensure_running", lambda path, kind: False)
    monkeypatch.setattr(real_service, "tick_once", lambda path, kind, **_: SimpleNamespace(unreachable=()))
    monkeypatch.chdir(tmp_path)
    with Store.open(home / "registry.db") as store:
        made = World(root, store, identity, data)
        monkeypatch.setattr(time, "sleep", interrupted)
        yield made


def offered(said: Typed) -> list[tuple[str, ...]]:
    return [tuple(words) for words in commands_in(f"{said.out}\n{said.err}") if not is_name(words)]


def check(orch: Type, run: str, lines: Sequence[str] = TYPED) -> int:
    by_command: dict[tuple[str, ...], str] = {}
    for line in lines:
        said = orch(*line.format(run=run).split())
        assert said.code != 1, f"orch {line}: {said.err}"
        for words in offered(said):
            by_command.setdefault(words, line)
    wrong = [f"`orch {line}` offers `orch {' '.join(words)}`: {why}" for words, line in by_command.items()
             if (why := _why_refused(orch, words))]  # fmt: skip
    assert not wrong, "\n".join(wrong)
    return len(by_command)


def _why_refused(orch: Type, words: tuple[str, ...]) -> str:
    if why := why_not_typed(list(words)):
        return why
    typed = " ".join(words)
    if typed.startswith(ONLY_UNDERSTOOD) or any(word.isupper() for word in words):
        return ""  # an example: its CAPITALS stand for something
    said = orch(*words, *(["--timeout", "0"] if words[0] == "wait" else []))
    return "" if said.code in FINE and "Traceback" not in said.err else f"exit code {said.code}: {said.err}"


@pytest.mark.parametrize("state", list(RunState))
def test_every_command_that_is_offered_fits_the_state(orch: Type, world: World, state: RunState) -> None:
    assert check(orch, world.run(state)) > 5


VARIANTS: dict[str, Callable[[World], str]] = {
    "held, and a rank's log says why": lambda world: world.run(RunState.HELD, failure=KILLED),
    "failed before its agents started": lambda world: world.run(RunState.FAILED, failure=NOT_STARTED),
    "a command that has finished": lambda world: world.run(RunState.SUCCEEDED, command=True),
    "a restore test that failed": lambda world: world.run(
        RunState.FAILED, failure=NOT_STARTED, test_of=world.run(RunState.SUCCEEDED)
    ),
    "a restore test that succeeded": lambda world: world.run(
        RunState.SUCCEEDED, test_of=world.run(RunState.SUCCEEDED)
    ),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_offered_commands_of_other_runs(orch: Type, world: World, variant: str) -> None:
    assert check(orch, VARIANTS[variant](world)) > 5


@pytest.mark.parametrize("state", [RunState.CREATED, RunState.RUNNING])
def test_offered_commands_without_controller(orch: Type, world: World, state: RunState) -> None:
    run = world.run(state)
    lease = world.store.lease()
    assert lease is not None
    world.store.drop_lease(lease)
    assert "`orch controller start` starts one" in orch("status", run).err
    assert check(orch, run) > 5


def test_offered_commands_depend_on_the_state(orch: Type, world: World) -> None:
    held, rejected = world.run(RunState.HELD, failure=KILLED), world.run(RunState.HELD)
    done, program = world.run(RunState.SUCCEEDED), world.run(RunState.SUCCEEDED, command=True)
    assert f"orch logs {held} --rank first-error" in orch("show", held).err
    assert "first-error" not in orch("show", rejected).err
    assert f"orch logs {rejected} " not in orch().out
    for verb in (("save",), ("attach", "--stack"), ("drill", "kill-rank")):
        typed = [verb[0], done, *verb[1:]] if verb[0] != "attach" else ["attach", done, "--stack"]
        assert f"it has finished:  orch show {done}   train on:  orch resume {done} train.steps=400" in orch(*typed).err
        assert "orch resume" not in orch(*[program if word == done else word for word in typed]).err


def test_first_error_from_registry(orch: Type, world: World) -> None:
    run = world.run(RunState.FAILED, failure=NOT_STARTED)
    caught = RunDir(world.root / run).attempt(1).submission / "41_0_log.err"
    caught.write_text("bash: line 3: python9: command not found\n")
    said = orch("logs", run, "--rank", "first-error")
    assert said.code == 0
    assert said.out.splitlines() == [
        "attempt 1: launch_failed: job 41 ended as FAILED, before its agents started",
        "bash: line 3: python9: command not found",
    ]
    assert f"from {caught}" in said.err


def test_wrong_hint_is_found(orch: Type, world: World, monkeypatch: Patch) -> None:
    run = world.run(RunState.SUCCEEDED)
    monkeypatch.setattr(RunView, "after_end", property(lambda view: f"continue:  orch resume {view.run}"))
    with pytest.raises(AssertionError, match=f"`orch attach {{run}} --stack` offers `orch resume {run}`: exit code 4"):
        check(orch, run, ["attach {run} --stack"])
