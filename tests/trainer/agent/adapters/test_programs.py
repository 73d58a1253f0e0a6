"""Unchanged programs of real frameworks: they save on request after the same step, stop, and resume from there."""

import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.agent.job import LocalJob, until
from trainer.agent.adapters import registry
from trainer.protocol.events import EventKind
from trainer.protocol.failures.outcome import AttemptResult
from trainer.protocol.heartbeat import Heartbeat
from trainer.protocol.requests import Request, RequestKind

pytestmark = [pytest.mark.multi, pytest.mark.proof, pytest.mark.timeout(400)]

HERE = Path(__file__).parent
PLACES = [
    HERE.parents[3] / ".venv" / "interop",
    *map(Path, filter(None, os.environ.get("ORCH_FRAMEWORKS", "").split(":"))),
]
"""Folders with frameworks besides those of this environment."""


@dataclass(frozen=True)
class Program:
    file: str
    package: str
    nodes: int = 2
    ranks: int = 1
    adapter: str = ""  # the program's name if empty
    words: tuple[str, ...] = ()


PROGRAMS = {
    "hf": Program("hf.py", "transformers"),
    "accelerate": Program("accelerate_program.py", "accelerate"),
    "deepspeed": Program("deepspeed_program.py", "deepspeed"),
    "lightning": Program("lightning_program.py", "lightning", nodes=1, ranks=2),
    "torchtitan": Program("torchtitan_program.py", "torchtitan", adapter="dcp"),
    "torchtitan async": Program("torchtitan_program.py", "torchtitan", adapter="dcp", words=("async",)),
}


def _environment(package: str) -> dict[str, str]:
    missing = importlib.util.find_spec(package) is None and not any((place / package).is_dir() for place in PLACES)
    if missing:
        pytest.skip(f"{package} is not installed; name its folder in ORCH_FRAMEWORKS")
    return {"PYTHONPATH": ":".join(map(str, PLACES)), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}


def _ask(work: LocalJob, kind: RequestKind) -> str:
    name = Request(kind=kind, attempt=1, reason="enough").write(work.run.requests)
    return str(until(lambda: _answers(work).get(name), 60, work.story))


def _answers(work: LocalJob) -> dict[str, Any]:
    return {event.data["name"]: event.data["answer"] for event in work.events(EventKind.REQUEST_ANSWERED)}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_saves_on_request_and_resumes_there(job: Callable[..., LocalJob], tmp_path: Path, name: str) -> None:
    program, out = PROGRAMS[name], tmp_path / "out"
    adapter = registry.load(program.adapter or name)
    out.mkdir()
    environment = _environment(program.package)

    def start(folder: str, steps: int, **variables: str) -> LocalJob:
        command = [sys.executable, str(HERE / "programs" / program.file), str(out), str(steps), *program.words]
        env = {**environment, **variables}
        work = job(folder=folder, nodes=program.nodes, ranks=program.ranks, command=command, env=env)
        work.start().go()
        return work

    work = start("first", 100000)
    until(lambda: _trained(work), 120, work.story)
    saved = _ask(work, RequestKind.SAVE)
    assert saved.startswith("saved at step ")
    assert _ask(work, RequestKind.STOP) == "the ranks were asked to save and stop"
    work.wait(60)
    assert work.outcome().result is AttemptResult.STOPPED, work.story()
    found = adapter.checkpoints(str(out))
    assert {adapter.damage(path) for _, path in found} == {""}
    assert found[-2][0] == int(saved.split()[-1])
    step, newest = found[-1]
    ended = max(int(event.data["step"] or 0) for event in work.events(EventKind.GENERATION_ENDED))
    assert ended in (0, step)
    again = start("second", step + 3, ORCH_RESUME_PATH=newest)
    assert set(again.wait(120)) == {0}, again.story()
    assert f"final {step + 3} " in again.attempt.rank_log(0).read_text().replace("\n", " ")


def _trained(work: LocalJob) -> bool:
    heartbeat = work.attempt.heartbeat
    return heartbeat.exists() and (Heartbeat.read(heartbeat).step or 0) > 5
