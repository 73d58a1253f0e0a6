"""A rank that trains alone in the test process: the real loop with a fake checkpointer."""

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from checkpointing.errors import SaveFailed
from checkpointing.storage.durable import canonical
from tests.trainer.conftest import TINY, merged
from trainer.parallel.apply import mesh
from trainer.protocol.config import JobConfig
from trainer.protocol.events import Event, read_events
from trainer.protocol.failures.outcome import ExitCode
from trainer.protocol.launch_token import LaunchToken
from trainer.protocol.messages.ranks import RankSpec
from trainer.protocol.plain_data import build
from trainer.protocol.rank_progress.progress import ProgressCell, StopReason
from trainer.protocol.run_dir import RunDir
from trainer.worker import main, workload
from trainer.worker.reporting.metrics import Journal
from trainer.worker.saved_state.train_state import TrainState
from trainer.worker.session import RankSession, new_train_state, run_training

CPU = torch.device("cpu")


def workload_of(module: str, name: str, **args: object) -> dict[str, object]:
    return {"target": f"{module}:{name}", "args": {"width": 8, **args}}


PLANE = workload_of("tests.trainer.worker.my_workload", "Plane")
VALIDATED = workload_of("tests.trainer.worker.my_workload", "Validated")


@dataclass
class KeptSaves:
    """In-memory checkpointer that commits accepted saves immediately."""

    accepts: Callable[[int], bool] = lambda step: True
    commits: bool = True
    committed_step: int | None = None
    failure: str | None = None
    lasting: SaveFailed | None = None
    save_seconds: Sequence[float] = ()
    saved: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    facts: dict[int, dict[str, Any]] = field(default_factory=dict)
    tried: list[int] = field(default_factory=list)
    waits: int = 0

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> None:
        pass

    def before_optimizer_step(self) -> None:
        pass

    def save(
        self, step: int, tensors: Mapping[str, torch.Tensor], extra: dict[str, Any],
        rank_state: dict[str, Any] | None = None, trained: Collection[str] = (),
    ) -> bool:  # fmt: skip
        self.tried.append(step)
        if not self.accepts(step):
            return False
        self.saved[step] = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self.facts[step] = extra
        if self.commits:
            self.committed_step = step
        return True

    def restore(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError

    def wait(self) -> None:
        self.waits += 1

    def close(self, flush_for: Callable[[], float] | None = None) -> None:
        pass


@dataclass
class OneRank:
    session: RankSession
    journal: Journal
    saver: KeptSaves
    state: TrainState
    skip: frozenset[int] = frozenset()

    def train(self, test_until: int = 0) -> ExitCode:
        token = self.session.launch_token()
        return run_training(self.session, self.state, self.saver, self.journal, token, self.skip, test_until=test_until)

    def restart(self) -> None:
        self.cell.close()
        self.session = replace(self.session, cell=ProgressCell.create())

    @property
    def cell(self) -> ProgressCell:
        return self.session.cell

    def lines(self) -> dict[int, dict[str, Any]]:
        self.journal.settle()
        found = [json.loads(line) for line in self.session.attempt.metrics.read_text().splitlines()]
        return {line["step"]: line for line in found}

    def events(self, kind: str) -> list[Event]:
        self.journal.settle()
        found, _ = read_events(self.session.attempt.rank_events("n"))
        return [event for event in found if event.kind == kind]

    def validated(self) -> list[int]:
        self.journal.settle()
        file = self.session.attempt.validation
        return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []

    def final(self) -> dict[str, Any]:
        return dict(json.loads(self.session.attempt.final.read_text()))


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def one_rank(world: None, tmp_path: Path) -> Iterator[Callable[..., OneRank]]:
    """`one_rank(train={...}, workload={...})` -> OneRank; `saver` and `skip` are not part of the configuration."""
    made: list[OneRank] = []

    def make(saver: KeptSaves | None = None, skip: Sequence[int] = (), **over: Any) -> OneRank:
        made.append(_new_rank(tmp_path / f"run-{len(made)}", saver or KeptSaves(), frozenset(skip), over))
        return made[-1]

    yield make
    for one in made:
        one.journal.close()
        one.cell.close()


def _new_rank(folder: Path, saver: KeptSaves, skip: frozenset[int], over: dict[str, Any]) -> OneRank:
    values = merged(TINY, {"workload": PLANE, **over})
    config = build(JobConfig, values)
    assert isinstance(config, JobConfig)
    run = RunDir(folder)
    run.make()
    run.config.write_bytes(canonical(values))
    attempt = run.attempt(1)
    attempt.make()
    for file in (attempt.work_log("n"), attempt.metrics, attempt.rank_events("n"), attempt.final):
        file.parent.mkdir(parents=True, exist_ok=True)
    LaunchToken(attempt=1, epoch=1, job_id="1", nonce="0123abcd").write(attempt.go)
    spec = RankSpec(
        run_dir=str(folder), attempt=1, generation=1, rank=0, local_rank=0, world_size=1, local_world_size=1, node=0,
        node_name="n", cell_fd=-1, control_fd=-1, host="",
    )  # fmt: skip
    torch.manual_seed(config.train.seed)
    objects = main._build(workload.build(config), config, mesh.build(config.parallel, CPU, 0, 1))
    session = RankSession(
        spec=spec, config=config, run_dir=run, cell=ProgressCell.create(), objects=objects, started=time.monotonic(),
        key=b"",
    )  # fmt: skip
    journal = Journal(attempt, spec)
    state = new_train_state(session, journal, skip)
    if objects.set_initial_weights is not None:
        objects.set_initial_weights()
    return OneRank(session, journal, saver, state, skip)


def ask(run: OneRank, reason: StopReason, *, at: int) -> None:
    workload: Any = run.session.objects.workload
    workload.at = lambda number: number == at and run.cell.ask_stop(reason)
