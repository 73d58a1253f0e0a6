"""Commands about runs of another cluster, and about a Slurm that does not answer this shell or the controller."""

import os
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpointing.storage.durable import dump_line
from orchestrator.cli.access import run_folder
from orchestrator.cli.access.slurm_environment import compare_with_controller
from orchestrator.cli.runs.submit import _no_job_yet
from orchestrator.controller import service
from orchestrator.errors import Precondition
from orchestrator.home import registry_path
from orchestrator.registry.lease import host_file
from orchestrator.registry.records import Attempt, Run
from orchestrator.scheduler import available_schedulers
from orchestrator.scheduler.slurm.client_environment import ClientEnvironment
from orchestrator.states import AttemptState, RunState
from tests.orchestrator.cli.conftest import Patch, Seeds, Type

HERE, FAR = "lab@login1:6817/aaaaaaaa", "lab@login2:6817/bbbbbbbb"


class Sites:
    def __init__(self, seeds: Seeds) -> None:
        self.seeds, self.store = seeds, seeds.store

    def run(self, scheduler: str, state: RunState = RunState.RUNNING) -> str:
        name = self.seeds.run(state=state)
        self.belongs(name, scheduler)
        return name

    def belongs(self, name: str, scheduler: str) -> None:
        def update() -> None:
            self.store.database.update(Run, {"scheduler": scheduler, "cluster": "slurm"}, name=name)
            self.store.database.update(Attempt, {"scheduler": scheduler}, run=name)

        self.store.together(update)

    def over(self, name: str) -> None:
        self.store.move_attempt(name, 1, AttemptState.ENDED, "over", epoch=self.seeds.epoch, now=time.time())

    def controller(self, scheduler: str, host: str = "login2") -> None:
        assert self.store.take_lease(f"{host}:7:7", time.time(), 3600.0, scheduler) is not None

    def alone(self) -> None:
        held = self.store.lease()
        assert held is not None
        self.store.drop_lease(held)


@pytest.fixture
def sites(seeds: Seeds, monkeypatch: Patch) -> Iterator[Sites]:
    monkeypatch.setattr(run_folder, "reaches", lambda kind, scheduler: scheduler in ("", HERE))
    for name in ("ensure_running", "tick_once"):
        monkeypatch.setattr(service, name, lambda path, kind: pytest.fail("nothing may be started here for another"))
    return Sites(seeds)


def test_cluster_of_run(orch: Type, sites: Sites) -> None:
    runs = [sites.run(HERE), sites.run(FAR), sites.run("")]
    rows = {row["run"]: row for row in orch("status", "--json").data}
    assert [rows[run]["slurm_cluster"] for run in runs] == [HERE, FAR, None]
    assert {rows[run]["cluster"] for run in runs} == {"slurm"}
    assert orch("show", runs[1], "--json").data["slurm_cluster"] == FAR
    assert orch("show", runs[1], "--json").data["attempts"][0]["slurm_cluster"] == FAR
    assert FAR in orch("show", runs[1]).out


def test_cluster_without_controller(orch: Type, sites: Sites) -> None:
    sites.run(HERE)
    sites.run(FAR)
    sites.alone()
    sites.controller(HERE, "login1")
    (warning,) = orch("status", "--json").answer["warnings"]
    assert warning["code"] == "no_controller"
    assert f"no controller for {FAR} is running" in warning["message"]
    assert f"on a login node of {FAR}" in warning["message"]
    shown = orch("status").err
    assert f"of {HERE} ok (no pass yet, login1)" in shown
    assert f"{FAR} ok" not in shown


def test_controller_status_lists_every_cluster(orch: Type, sites: Sites) -> None:
    sites.alone()
    sites.controller(HERE, "login1")
    sites.controller(FAR, "login2")
    listed = {one["scheduler"]: one for one in orch("controller", "status", "--json").data["controllers"]}
    assert [(listed[name]["host"], listed[name]["alive"]) for name in (HERE, FAR)] == [
        ("login1", True),
        ("login2", True),
    ]
    said = orch("controller", "status").out
    assert f"alive for {HERE}: pid 7 on login1" in said
    assert f"alive for {FAR}: pid 7 on login2" in said


def test_wait_without_controller(orch: Type, sites: Sites) -> None:
    run = sites.run(FAR)
    sites.alone()
    refused = orch("wait", run)
    assert refused.code == 4
    assert f"no controller for {FAR} is running" in refused.err
    assert f"`orch controller start` on a login node of {FAR}" in refused.err


def test_wait_for_other_cluster(orch: Type, sites: Sites) -> None:
    run = sites.run(FAR)
    sites.alone()
    sites.controller(FAR)
    assert orch("wait", run, "--timeout", "0.1").code == 124


@pytest.mark.parametrize("lives", [True, False])
def test_request_waits_for_controller(orch: Type, sites: Sites, lives: bool, monkeypatch: Patch) -> None:
    monkeypatch.setattr("orchestrator.cli.runs.cancel_resume.ANSWER_TIMEOUT", 0.1)
    monkeypatch.setattr(service, "ensure_running", lambda path, kind: False)
    run = sites.run(FAR)
    sites.alone()
    if lives:
        sites.controller(FAR)
    done = orch("cancel", run)
    assert [(ask.run, ask.verb) for ask in sites.store.user_requests()] == [(run, "cancel")]
    assert f"requested; the controller of {FAR} has not answered yet" in done.out
    assert done.code == (0 if lives else 4)
    assert (f"no controller for {FAR} is running" in done.err) is not lives


def test_release_on_other_cluster(orch: Type, sites: Sites) -> None:
    sites.run(FAR)
    now, epoch = time.time(), sites.seeds.epoch
    sites.store.saw_node("n2", FAR, epoch=epoch, now=now, failure="it hung")
    sites.store.exclude_node("n2", FAR, now + 3600, "it hung", epoch=epoch, now=now)
    sites.alone()
    refused = orch("nodes", "release", "n2")
    assert refused.code == 4
    assert "n2: requested; the controller has not answered yet" in refused.out
    assert f"no controller for {FAR} is running" in refused.err


def test_take_over_needs_ended_job(orch: Type, sites: Sites, monkeypatch: Patch) -> None:
    monkeypatch.setattr("orchestrator.cli.runs.cancel_resume.ANSWER_TIMEOUT", 0.1)
    monkeypatch.setattr("orchestrator.cli.runs.cancel_resume._key_here", lambda kind, must: HERE)
    started: list[str] = []
    monkeypatch.setattr(service, "ensure_running", lambda path, kind: started.append(kind))
    run = sites.run(FAR, RunState.HELD)
    refused = orch("resume", run, "--here")
    assert refused.code == 4
    assert f"may have a live job on {FAR}" in refused.err
    sites.over(run)
    assert orch("resume", run, "--here").code == 0
    (ask,) = sites.store.user_requests()
    assert (ask.verb, ask.args["here"], started) == ("resume", HERE, ["slurm"])


def test_local_runs(orch: Type, seeds: Seeds) -> None:
    assert run_folder.reaches("local", f"local@{socket.gethostname()}")
    assert not run_folder.reaches("local", "local@elsewhere")
    assert run_folder.where_to_type("local@elsewhere") == "on elsewhere"


@pytest.fixture
def silent_slurm(seeds: Seeds, tmp_path: Path, monkeypatch: Patch) -> None:
    for name in ("sbatch", "squeue", "scancel", "scontrol", "sinfo", "sacct"):
        (tmp_path / name).write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    for state in (RunState.RUNNING, RunState.HELD):
        Sites(seeds).run(HERE, state)
    seeds.store.saw_node("n1", HERE, epoch=seeds.epoch, now=1.0)
    Sites(seeds).alone()


@pytest.mark.usefixtures("silent_slurm")
@pytest.mark.parametrize(
    ("verb", "state"), [("cancel", RunState.RUNNING), ("resume", RunState.HELD), ("nodes", RunState.RUNNING)]
)
def test_request_to_silent_slurm(orch: Type, seeds: Seeds, verb: str, state: RunState) -> None:
    run = next(run.name for run in seeds.store.runs() if run.state is state)
    words = ("nodes", "exclude", "n1") if verb == "nodes" else (verb, run)
    said = orch(*words, "--no-controller")
    told = " ".join(said.err.split())
    assert said.code == 5, said
    assert "warning: slurm does not answer from here" in told
    assert "SLURM_CONF is not set): the request stands; in a shell where `sinfo` answers" in told
    assert "requested; the controller has not answered yet" in said.out
    assert len(seeds.store.user_requests()) == 1


@pytest.mark.usefixtures("silent_slurm")
def test_cancel_of_unsubmitted_run(orch: Type, seeds: Seeds) -> None:
    new = replace(seeds.new("fresh"), cluster="slurm")
    run = seeds.store.create_run(new, now=time.time(), nonce="0123abcd")[0].name
    said = orch("cancel", run, "--no-controller")
    assert (said.code, seeds.store.run(run).state) == (0, RunState.CANCELLED), said
    assert orch("rm", run, "-y").code == 0


@pytest.mark.usefixtures("silent_slurm")
@pytest.mark.parametrize("verb", ["cancel", "resume"])
def test_impossible_request(orch: Type, seeds: Seeds, verb: str) -> None:
    run = next(run.name for run in seeds.store.runs() if run.state is RunState.HELD)
    Sites(seeds).belongs(run, "")
    said = orch(verb, run, "--no-controller")
    assert said.code == 5, said
    assert f"it is not known which cluster has the jobs of {run}" in said.err
    assert "run the same command again in a shell where `sinfo` answers" in " ".join(said.err.split())
    assert seeds.store.user_requests() == []


def test_cancel_on_unknown_cluster(orch: Type, seeds: Seeds, monkeypatch: Patch) -> None:
    monkeypatch.setattr("orchestrator.cli.runs.cancel_resume._key_here", lambda kind, must: HERE)
    run = Sites(seeds).run("", RunState.HELD)
    said = orch("cancel", run)
    assert said.code == 4
    assert f"if it is this one ({HERE}): `orch resume {run} --here`, then" in " ".join(said.err.split())
    assert seeds.store.user_requests() == []


SILENT = "scontrol gave no answer within 10 s"


@pytest.fixture
def screen(monkeypatch: Patch) -> Any:
    monkeypatch.setattr(available_schedulers, "lease_key", lambda kind: "")
    monkeypatch.setenv("SLURM_CONF", "/etc/here.conf")
    monkeypatch.delenv("SLURM_JWT", raising=False)
    said: list[str] = []
    return SimpleNamespace(said=said, note=said.append, warn=lambda code, text: said.append(f"{code}: {text}"))


def controller(seeds: Seeds, silence: str = "", **client: Any) -> None:
    same = ClientEnvironment.from_environ().to_json()
    fields = {"pid": 7, "client": {**same, **client}, "silence": silence}
    host_file(registry_path(), "slurm", "", "login1").write_text(dump_line(fields))


def test_unremarkable_controllers(seeds: Seeds, screen: Any) -> None:
    compare_with_controller(screen, "slurm")
    controller(seeds, variables={"SLURM_CONF": "/etc/there.conf"})
    compare_with_controller(screen, "slurm")
    controller(seeds, SILENT)
    compare_with_controller(screen, "slurm")
    compare_with_controller(screen, "local")
    assert screen.said == []


def test_environment_that_can_be_taken_over(seeds: Seeds, screen: Any) -> None:
    controller(seeds, SILENT, variables={})
    compare_with_controller(screen, "slurm")
    assert screen.said == [
        "the controller (pid 7 on login1) gets no answer from Slurm; it continues with this shell's environment"
    ]


def test_environment_that_cannot_be_taken_over(seeds: Seeds, screen: Any) -> None:
    controller(seeds, SILENT, variables={}, token="0badcafe0bad")
    with pytest.raises(Precondition) as refused:
        compare_with_controller(screen, "slurm")
    assert refused.value.what == f"the controller (pid 7 on login1) gets no answer from Slurm: {SILENT}"
    assert refused.value.where == "its SLURM_CONF is unset, not /etc/here.conf; its SLURM_JWT is different"
    assert refused.value.hint.startswith("`orch controller stop`, then run the command again")


def test_another_sbatch_is_warned_of(seeds: Seeds, screen: Any) -> None:
    controller(seeds, sbatch="/opt/old/bin/sbatch")
    compare_with_controller(screen, "slurm")
    (said,) = screen.said
    assert said.startswith("other_sbatch: the controller (pid 7 on login1) submits with /opt/old/bin/sbatch, not with")


def test_controller_without_answer_is_reported(orch: Type, seeds: Seeds) -> None:
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
        ({"reason": "waits for room"}, "/a", "no job yet: waits for room; the controller keeps trying"),
        ({}, "/a", f"no job yet: {SILENT}; the controller keeps trying: orch status a-1"),
        ({}, "", f"no job yet: {SILENT}; SLURM_CONF is not set; the controller"),
        ({"scheduler": "lab@login1:6817/0badcafe"}, "", "no job yet; the controller keeps trying"),
        ({"cluster": "local"}, "", f"no job yet: {SILENT}; the controller keeps trying"),
    ],
)
def test_no_job_yet(row: dict[str, str], conf: str, words: str, seeds: Seeds, monkeypatch: Patch) -> None:
    monkeypatch.setenv("SLURM_CONF", conf)
    controller(seeds, SILENT)
    monkeypatch.setattr(
        "orchestrator.registry.fast_queries.lease", lambda path, key: seeds.store.lease() if key is None else None
    )
    whole = {"run": "a-1", "reason": "", "scheduler": "", "cluster": "slurm", **row}
    assert _no_job_yet(SimpleNamespace(**whole)).startswith(words)
