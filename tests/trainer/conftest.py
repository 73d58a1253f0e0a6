"""Runs of real ranks over gloo, forked by a small stand-in for the agent."""

import json
import os
import subprocess
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from checkpointing.storage.durable import canonical
from orchestrator.tokenization import shard_writer
from tests.warm_root import WarmChild, start_warm
from trainer.protocol.events import Event, read_events
from trainer.protocol.failures.rank_end import RankEnd, find_outcome
from trainer.protocol.launch_token import LaunchToken
from trainer.protocol.logs.line_file import work_lines
from trainer.protocol.run_dir import AttemptDir, RunDir

with warnings.catch_warnings():
    # Warns once about NumPy, which neither torch nor orch needs; warnings are errors here.
    warnings.simplefilter("ignore")
    import torch  # noqa: F401

HERE = Path(__file__).parent
TINY = {
    "cluster": {"cpus_per_task": 1},
    "model": {"dim": 32, "layers": 1, "heads": 4, "kv_heads": 2, "ffn_dim": 64},
    "train": {"steps": 8, "seed": 7, "batch_size": 8, "seq_len": 16},
    "optimizer": {"warmup_steps": 2, "lr": 1e-2},
    "checkpoint": {"every": 3, "keep": 2},
}


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` laid over `base`, group by group."""
    return {
        key: merged(base.get(key, {}), over[key]) if isinstance(over.get(key), dict) else over.get(key, base.get(key))
        for key in {**base, **over}
    }


def ranks_of_node(world: int) -> dict[str, int]:
    """The ranks of one node, on GPUs where ORCH_TEST_GPUS says that there are as many: `make test-gpu`."""
    gpus = int(os.environ.get("ORCH_TEST_GPUS", "0"))
    return {"ranks_per_node": world, "gpus_per_node": world if world <= gpus else 0}


def hang(rank: int, step: int) -> dict[str, Any]:
    """A drill: `rank` waits for ever for the batch of this step, in the first generation."""
    return {"events": [{"kind": "hang-in-data", "rank": rank, "step": step}]}


def rank_environment() -> dict[str, str]:
    """Variables of the stand-in: it finds the tests before what the environment has."""
    path = os.pathsep.join(filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


@dataclass
class Ranks:
    """The running stand-in, one scenario at a time."""

    process: "WarmChild | subprocess.Popen[str]"

    def run(self, **scenario: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(scenario) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@dataclass
class Run:
    """One run directory, trained by as many generations as a test asks for."""

    ranks: Ranks
    dir: RunDir
    world: int
    generations: int = 0
    attempt_number: int = 1
    answers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def attempt(self) -> AttemptDir:
        return self.dir.attempt(self.attempt_number)

    def train(self, actions: list[dict[str, Any]] | None = None, patience: float = 120.0) -> dict[str, Any]:
        """One generation; returns exit codes and last steps."""
        self.generations += 1
        answer = self.ranks.run(
            run_dir=str(self.dir.path),
            attempt=self.attempt_number,
            generation=self.generations,
            world=self.world,
            actions=actions or [],
            patience=patience,
        )
        assert not answer["timed_out"], self.log()
        return answer

    def train_until_killed(self, rank: int, committed: int, **until: int) -> dict[str, Any]:
        """One generation in which `rank` is killed once step `committed` is; it must hang at a later step: `hang`."""
        kill = {"do": "kill", "rank": rank, "of_rank": rank, "at_step": 1, "committed": committed}
        return self.train(actions=[kill | until])

    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.attempt.logs.glob("rank-*.log")))

    def metrics(self, generation: int | None = None) -> dict[int, dict[str, Any]]:
        """Metric lines by step, the newest line of each."""
        lines = [json.loads(line) for line in self.attempt.metrics.read_text().splitlines()]
        return {line["step"]: line for line in lines if generation in (None, line["generation"])}

    def losses(self, generation: int | None = None) -> dict[int, float]:
        return {step: line["loss"] for step, line in self.metrics(generation).items()}

    def validations(self) -> dict[int, dict[str, float]]:
        """Numbers of validations by step, the newest of each."""
        lines = [json.loads(line) for line in self.attempt.validation.read_text().splitlines()]
        return {line["step"]: line["metrics"] for line in lines}

    def assert_trained_again(
        self, *steps: int, names: tuple[str, ...] = ("loss", "grad_norm", "lr", "position")
    ) -> None:
        """The second generation gave these steps the figures that they had in the first."""
        first, again = (
            {step: [line[name] for name in names] for step, line in self.metrics(number).items() if step in steps}
            for number in (1, 2)
        )
        assert sorted(first) == sorted(steps), self.log()
        assert again == first

    def work(self) -> list[dict[str, Any]]:
        return work_lines(self.attempt)

    def events(self, rank: int = 0) -> list[Event]:
        """What this rank wrote, in its order."""
        return [one for one in read_events(self.attempt.rank_events("n0"))[0] if one.source == f"rank-{rank:05d}"]

    def outcome(self, rank: int, generation: int) -> RankEnd:
        found = find_outcome(self.attempt, "n0", rank, generation)
        assert found is not None
        return found

    def final(self) -> dict[str, Any]:
        return json.loads(self.attempt.final.read_text())


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    process = start_warm("tests.trainer.worker.fake_agent:main", environ=rank_environment())
    assert process.stdout.readline() == "ready\n"
    yield Ranks(process)
    process.communicate(timeout=30)


@pytest.fixture(scope="session")
def text_tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few real text files as tokens: the source of Python's own json package."""
    import json as package

    out = tmp_path_factory.mktemp("data") / "tokens"
    shard_writer.prepare([Path(package.__file__).parent], out)
    return out


def new_run(ranks: Ranks, folder: Path, tokens: Path, world: int, over: dict[str, Any]) -> Run:
    # The benchmark of a node has tests of its own. Of several ranks, it is where they meet: one that ends before may
    # take the store away from the others.
    small = {"data": {"path": str(tokens)}, "detection": {"preflight": {"on": world > 1, "seconds": 1e-6}}}
    config = merged({**TINY, **small}, over)
    config["cluster"] = {**ranks_of_node(world), **config["cluster"]}
    run = RunDir(folder)
    run.make()
    run.config.write_bytes(canonical(config))
    attempt = run.attempt(1)
    attempt.make()
    LaunchToken(attempt=1, epoch=1, job_id="1", nonce="0123abcd").write(attempt.go)
    return Run(ranks=ranks, dir=run, world=world)


@pytest.fixture
def make_run(ranks: Ranks, text_tokens: Path, tmp_path: Path) -> Any:
    """`make_run(world, parallel={...}, train={...})` -> Run."""

    def make(world: int = 1, name: str = "", **over: Any) -> Run:
        folder = tmp_path / (name or f"run-{len(list(tmp_path.iterdir()))}")
        return new_run(ranks, folder, text_tokens, world, over)

    return make


@pytest.fixture(scope="session")
def undisturbed(ranks: Ranks, text_tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """As `make_run`, but trained to its end already, and one for all tests that ask for the same: to be read only."""
    finished: dict[str, Run] = {}

    def get(world: int = 1, **over: Any) -> Run:
        key = json.dumps([world, over], sort_keys=True)
        if key not in finished:
            run = new_run(ranks, tmp_path_factory.mktemp("undisturbed") / "run", text_tokens, world, over)
            assert run.train()["codes"] == [0] * world, run.log()
            finished[key] = run
        return finished[key]

    return get
