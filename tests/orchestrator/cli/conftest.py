"""`orch` in this process, in a private home, with a registry filled through the Store."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from checkpointing.storage.durable import dump_line
from orchestrator.cli import main
from orchestrator.registry.records import Checkpoint, Generation, NewRun, RestoreTest
from orchestrator.registry.store import Store
from orchestrator.states import AttemptState, RunState, Trust
from trainer.protocol.failures.outcome import Failure, FailureKind
from trainer.protocol.run_dir import RunDir


@dataclass(frozen=True)
class Typed:
    """Result of one command line."""

    code: int
    out: str
    err: str

    @property
    def answer(self) -> dict[str, Any]:
        return dict(json.loads(self.out))

    @property
    def data(self) -> Any:
        return self.answer["data"]


Type = Callable[..., Typed]
Patch = pytest.MonkeyPatch


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    monkeypatch.setenv("ORCH_HOME", str(folder))
    monkeypatch.delenv("ORCH_REGISTRY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("ORCH_SITE_CONFIG", "")
    return folder


@pytest.fixture
def orch(home: Path, capsys: pytest.CaptureFixture[str]) -> Type:
    def typed(*words: object) -> Typed:
        capsys.readouterr()
        code = main.run([str(word) for word in words])
        said = capsys.readouterr()
        return Typed(code, said.out, said.err)

    return typed


class Seeds:
    """A registry as a controller would fill it."""

    def __init__(self, store: Store, root: Path) -> None:
        self.store, self.root = store, root
        store.together(self._begin)

    def _begin(self) -> None:
        self.digest = self.store.put_config({"name": "tiny", "train": {"steps": 200}})
        lease = self.store.take_lease("login1:7:7", time.time(), 3600.0)
        assert lease is not None
        self.epoch = lease.epoch
        self.store.note_tick(lease, time.time())

    def new(self, slug: str) -> NewRun:
        return NewRun(
            slug=slug,
            cluster="local",
            root=self.root,
            config_digest=self.digest,
            total_steps=200,
            identity={"code": {"git": "1a2b3c4"}, "env": {"python": "3.11.7"}, "data": {"fingerprint": "f00d"}},
        )

    def run(self, slug: str = "tiny", state: RunState = RunState.RUNNING, reason: str = "") -> str:
        return self.store.together(lambda: self._run(slug, state, reason))

    def _run(self, slug: str, state: RunState, reason: str) -> str:
        now = time.time()
        run, _ = self.store.create_run(self.new(slug), now=now, nonce="0123abcd")
        Path(run.run_dir).mkdir(parents=True, exist_ok=True)
        RunDir(Path(run.run_dir)).run.write_text('{"nonce": "0123abcd"}')
        self.store.move_attempt(
            run.name, 1, AttemptState.SUBMITTED, "job 41", epoch=self.epoch, now=now, job_id="41", job_state="PENDING"
        )
        self.store.move_attempt(
            run.name, 1, AttemptState.RUNNING, "runs", epoch=self.epoch, now=now, nodes=("n1", "n2"), started_at=now
        )
        if state is not RunState.CREATED:
            self.store.move_run(run.name, state, reason, epoch=self.epoch, now=now, step=120, loss=2.5)
        return run.name

    def drop_lease(self) -> None:
        lease = self.store.lease()
        assert lease is not None
        self.store.drop_lease(lease)

    def tiers(self, run: str, *tiers: Mapping[str, object]) -> None:
        (self.root / run / "config.json").write_text(dump_line({"checkpoint": {"tiers": list(tiers)}}))

    def checkpoint(self, run: str, step: int, trust: Trust = Trust.VERIFIED, age: float = 0.0) -> None:
        name = f"step-{step:08d}.001-0123abcd"
        self.store.put_checkpoint(
            Checkpoint(
                run=run, name=name, step=step, attempt=1, trust=trust, bytes=1024, committed_at=time.time() - age,
                path=str(self.root / run / "checkpoints" / name),
            ),
            epoch=self.epoch,
        )  # fmt: skip

    def restore_test(
        self, run: str, step: int, verdict: str = "", reason: str = "", *, layout: str = "same", age: float = 60.0,
        **evidence: Any,
    ) -> str:  # fmt: skip
        """Record a restore test of `run` that ended `age` seconds ago, or is under way without a verdict."""
        now = time.time() - age
        name = f"step-{step:08d}.001-0123abcd"
        order = {"run": run, "checkpoint": name, "step": step, "layout": layout}
        new = NewRun(
            slug=f"{run}-test", cluster="local", root=self.root, config_digest=self.digest, total_steps=200,
            identity={"restore_test": order},
        )  # fmt: skip
        test = self.store.create_run(new, now=now, nonce="4567cdef")[0].name
        self.store.put_restore_test(RestoreTest(test=test, begun_at=now - 30.0, **order))
        if verdict:
            self.store.move_run(test, RunState.SUCCEEDED, "all ranks finished", epoch=self.epoch, now=now)
            self.store.end_restore_test(test, verdict, reason, evidence, epoch=self.epoch, now=now)
        return test

    def killed_rank(self, run: str) -> None:
        failure = Failure(kind=FailureKind.RANK_KILLED, reason="killed by signal 9", rank=1, node="n1", signal=9)
        first = Generation(
            run=run, attempt=1, number=1, started_at=100.0, ended_at=110.0, last_step=60, reason="rank 1 died",
            failure=failure.to_json(),
        )  # fmt: skip
        self.store.put_generation(first, epoch=self.epoch)
        self.store.put_generation(
            Generation(run=run, attempt=1, number=2, started_at=112.0, resumed_from=50), epoch=self.epoch
        )
        self.store.note_attempt(run, 1, epoch=self.epoch, failure=failure.to_json(), last_step=120)


@pytest.fixture
def seeds(home: Path, tmp_path: Path) -> Iterator[Seeds]:
    with Store.open(home / "registry.db") as store:
        yield Seeds(store, tmp_path / "runs")
