"""This shell's way to Slurm beside the controller's: compared at submit, and told where people look."""

from types import SimpleNamespace
from typing import Any

import pytest

from checkpointing.storage.durable import dump_line
from orchestrator.cli.access.slurm_environment import compare_with_controller
from orchestrator.cli.runs.submit import _no_job_yet
from orchestrator.errors import Precondition
from orchestrator.home import registry_path
from orchestrator.registry.lease import host_file
from orchestrator.scheduler import available_schedulers
from orchestrator.scheduler.slurm.client_environment import ClientEnvironment
from tests.orchestrator.cli.conftest import Seeds, Type

SILENT = "scontrol gave no answer within 10 s"


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(available_schedulers, "lease_key", lambda kind: "")
    monkeypatch.setenv("SLURM_CONF", "/etc/here.conf")
    monkeypatch.delenv("SLURM_JWT", raising=False)
    said: list[str] = []
    return SimpleNamespace(said=said, note=said.append, warn=lambda code, text: said.append(f"{code}: {text}"))


def controller(seeds: Seeds, silence: str = "", **client: Any) -> None:
    """What the one of the seeds (pid 7 on login1) has written down."""
    same = ClientEnvironment.from_environ().to_json()
    fields = {"pid": 7, "client": {**same, **client}, "silence": silence}
    host_file(registry_path(), "slurm", "", "login1").write_text(dump_line(fields))


def test_an_answered_controller_and_one_that_says_nothing_are_nobodys_business(seeds: Seeds, screen: Any) -> None:
    compare_with_controller(screen, "slurm")
    controller(seeds, variables={"SLURM_CONF": "/etc/there.conf"})
    compare_with_controller(screen, "slurm")
    controller(seeds, SILENT)
    compare_with_controller(screen, "slurm")
    compare_with_controller(screen, "local")
    assert screen.said == []


def test_what_a_controller_can_take_over_is_told(seeds: Seeds, screen: Any) -> None:
    controller(seeds, SILENT, variables={})
    compare_with_controller(screen, "slurm")
    assert screen.said == [
        "the controller (pid 7 on login1) gets no answer from Slurm; it goes on with this shell's environment"
    ]


def test_what_it_cannot_take_over_is_refused_with_the_cure(seeds: Seeds, screen: Any) -> None:
    controller(seeds, SILENT, variables={}, token="0badcafe0bad")
    with pytest.raises(Precondition) as refused:
        compare_with_controller(screen, "slurm")
    assert refused.value.what == f"the controller (pid 7 on login1) gets no answer from Slurm: {SILENT}"
    assert refused.value.where == "its SLURM_CONF is unset, not /etc/here.conf; its SLURM_JWT is another one"
    assert refused.value.hint.startswith("`orch controller stop`, then the same again")


def test_another_sbatch_is_warned_of(seeds: Seeds, screen: Any) -> None:
    controller(seeds, sbatch="/opt/old/bin/sbatch")
    compare_with_controller(screen, "slurm")
    (said,) = screen.said
    assert said.startswith("other_sbatch: the controller (pid 7 on login1) submits with /opt/old/bin/sbatch, not with")


def test_a_controller_that_gets_no_answer_is_not_ok(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    assert "controller ok" in orch("status", run).err
    controller(seeds, SILENT)
    said = orch("status", run)
    assert "controller gets no answer from Slurm" in said.err
    assert "controller ok" not in said.err
    assert f"gets no answer from Slurm: {SILENT}" in orch("controller", "status").out
    told = orch("controller", "status", "--json").data["controllers"]
    assert [one["silence"] for one in told] == [SILENT]


@pytest.mark.parametrize(
    ("row", "conf", "words"),
    [
        ({"reason": "waits for room"}, "/a", "no job yet: waits for room; the controller goes on trying"),
        ({}, "/a", f"no job yet: {SILENT}; the controller goes on trying: orch status a-1"),
        ({}, "", f"no job yet: {SILENT}; SLURM_CONF is not set here"),
        ({"scheduler": "lab@login1:6817/0badcafe"}, "", "no job yet; the controller goes on trying"),
        ({"cluster": "local"}, "", f"no job yet: {SILENT}; the controller goes on trying"),
    ],
)
def test_a_run_without_a_job_says_why(
    row: dict[str, str], conf: str, words: str, seeds: Seeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", conf)
    controller(seeds, SILENT)
    monkeypatch.setattr(
        "orchestrator.registry.fast_queries.lease", lambda path, key: seeds.store.lease() if key is None else None
    )
    whole = {"run": "a-1", "reason": "", "scheduler": "", "cluster": "slurm", **row}
    assert _no_job_yet(whole).startswith(words)
