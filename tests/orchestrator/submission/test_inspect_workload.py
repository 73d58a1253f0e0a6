"""The import before a submit: certain failures are refused, all others are left to the job."""

import os
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.run_config import ClusterConfig, RunConfig
from orchestrator.errors import ConfigError
from orchestrator.submission import user_code
from orchestrator.submission.user_code import ChildAnswer, _judge, inspecting, job_environment
from tests.orchestrator.submission.forked_inspection import FORKING
from trainer.parallel.data import FsdpConfig
from trainer.parallel.parallel_config import ParallelConfig
from trainer.protocol.config import WorkloadConfig
from trainer.protocol.user_code.code_record import CodeFile, CodeRecord

FAILED = {"failed": "importing mine:Mine raised ValueError: bad", "is_import": False}
ABSENT = {"failed": "cannot import mine: No module named 'numpy'", "is_import": True}


def own(**changes: Any) -> RunConfig:
    return RunConfig(workload=WorkloadConfig(target="mine:Mine"), **changes)


def judged(answer: ChildAnswer, kind: str = "slurm", **cluster: Any) -> tuple[CodeRecord | None, list[str]]:
    warned: list[str] = []
    return _judge(answer, own(cluster=ClusterConfig(**cluster)), kind, warned.append), warned


def test_the_imported_code_is_the_code_of_the_run() -> None:
    record = CodeRecord(files={"mine": CodeFile(path="/mine.py", sha256="1")})
    assert judged(ChildAnswer(found={"code": record.to_json(), "refused": []}, ended=True)) == (record, [])


def test_abilities_that_the_class_lacks_are_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.tp=2") as caught:
        judged(ChildAnswer(found={"refused": ["parallel.tp=2, but Mine has none", "set parallel.tp=1"]}, ended=True))
    assert caught.value.hint == "set parallel.tp=1"


@pytest.mark.parametrize(
    ("found", "kind", "templates", "refused"),
    [
        (ABSENT, "slurm", ("default",), True),
        (ABSENT, "slurm", ("modules",), False),
        (ABSENT, "local", ("modules",), True),
        (FAILED, "local", ("default",), True),
        (FAILED, "slurm", ("default",), False),
    ],
)
def test_a_failed_import_is_refused_where_the_job_would_see_the_same(
    found: dict[str, Any], kind: str, templates: tuple[str, ...], refused: bool
) -> None:
    answer = ChildAnswer(found=found, ended=True)
    if refused:
        with pytest.raises(ConfigError, match=found["failed"].partition(":")[0]):
            judged(answer, kind, templates=templates)
        return
    record, (warning,) = judged(answer, kind, templates=templates)
    assert record is None
    assert warning.startswith(found["failed"])


@pytest.mark.parametrize(
    ("answer", "words"),
    [(ChildAnswer(died="killed by SIGSEGV"), "killed by SIGSEGV"), (ChildAnswer(), "takes longer than 60 s here")],
)
def test_an_import_that_does_not_end_refuses_nothing(answer: ChildAnswer, words: str) -> None:
    record, (warning,) = judged(answer)
    assert record is None
    assert words in warning


@pytest.mark.parametrize(
    "config", [RunConfig(), own(command=("python", "train.py")), own(cluster=ClusterConfig(python="/other/python"))]
)
def test_nothing_is_imported_where_nothing_could_be_learnt(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.submission.user_code.BoundedChild", None)
    with inspecting(config, "local", os.environ) as finish:
        assert finish(print, print) is None


def test_the_import_sees_what_a_job_sees(tmp_path: Path) -> None:
    config = own(env={"COLOR": "green"}, env_from=("HF_TOKEN",))
    environ = job_environment(config, {"PYTHONPATH": str(tmp_path), "HF_TOKEN": "t", "EDITOR": "vi", "HOME": "/home"})
    assert str(tmp_path) not in environ.get("PYTHONPATH", "")
    wanted = {"COLOR": "green", "HF_TOKEN": "t", "HOME": "/home", "EDITOR": None, "ORCH_SECRETS": "HF_TOKEN"}
    assert {name: environ.get(name) for name in wanted} == wanted


def test_a_class_that_no_module_of_the_built_in_model_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_code, "subprocess", FORKING)
    config = RunConfig(parallel=ParallelConfig(fsdp=FsdpConfig(wrap="Nope")))
    with (
        inspecting(config, "local", os.environ) as finish,
        pytest.raises(ConfigError, match="no module of class Nope, only"),
    ):
        finish(lambda words: None, print)
