"""What is typed on one cluster about runs of another: where they are, and where to type it instead."""

import os
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.cli.access import run_folder
from orchestrator.controller import service
from orchestrator.states import AttemptState, RunState
from tests.orchestrator.cli.conftest import Seeds, Type

HERE, FAR = "lab@login1:6817/aaaaaaaa", "lab@login2:6817/bbbbbbbb"


class Sites:
    """Runs of two clusters; this host reaches the first one."""

    def __init__(self, seeds: Seeds) -> None:
        self.seeds, self.store = seeds, seeds.store

    def run(self, scheduler: str, state: RunState = RunState.RUNNING) -> str:
        name = self.seeds.run(state=state)
        self.belongs(name, scheduler)
        return name

    def belongs(self, name: str, scheduler: str) -> None:
        def update() -> None:
            self.store.database.update("runs", {"scheduler": scheduler, "cluster": "slurm"}, name=name)
            self.store.database.update("attempts", {"scheduler": scheduler}, run=name)

        self.store.together(update)

    def over(self, name: str) -> None:
        self.store.move_attempt(name, 1, AttemptState.ENDED, "over", epoch=self.seeds.epoch, now=time.time())

    def controller(self, scheduler: str, host: str = "login2") -> None:
        """One lives on another host."""
        assert self.store.take_lease(f"{host}:7:7", time.time(), 3600.0, scheduler) is not None

    def alone(self) -> None:
        """Nobody drives anything any more."""
        held = self.store.lease()
        assert held is not None
        self.store.drop_lease(held)


@pytest.fixture
def sites(seeds: Seeds, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sites]:
    monkeypatch.setattr(run_folder, "reaches", lambda kind, scheduler: scheduler in ("", HERE))
    for name in ("ensure_running", "tick_once"):
        monkeypatch.setattr(service, name, lambda path, kind: pytest.fail("nothing may be started here for another"))
    return Sites(seeds)


def test_status_says_which_cluster_a_run_belongs_to(orch: Type, sites: Sites) -> None:
    runs = [sites.run(HERE), sites.run(FAR), sites.run("")]
    rows = {row["run"]: row for row in orch("status", "--json").data}
    assert [rows[run]["slurm_cluster"] for run in runs] == [HERE, FAR, None]
    assert {rows[run]["cluster"] for run in runs} == {"slurm"}
    assert orch("show", runs[1], "--json").data["slurm_cluster"] == FAR
    assert orch("show", runs[1], "--json").data["attempts"][0]["slurm_cluster"] == FAR
    assert FAR in orch("show", runs[1]).out


def test_each_cluster_without_a_controller_is_warned_of(orch: Type, sites: Sites) -> None:
    sites.run(HERE)
    sites.run(FAR)
    sites.alone()
    sites.controller(HERE, "login1")
    (warning,) = orch("status", "--json").answer["warnings"]
    assert warning["code"] == "no_controller"
    assert f"no controller of {FAR} runs" in warning["message"]
    assert f"on a login node of {FAR}" in warning["message"]
    shown = orch("status").err
    assert f"of {HERE} ok (has not looked yet, login1)" in shown
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


def test_waiting_for_a_run_that_nobody_serves_from_here_ends_with_what_to_type(orch: Type, sites: Sites) -> None:
    run = sites.run(FAR)
    sites.alone()
    refused = orch("wait", run)
    assert refused.code == 4
    assert f"no controller of {FAR} runs" in refused.err
    assert f"`orch controller start` on a login node of {FAR}" in refused.err


def test_waiting_goes_on_while_the_other_cluster_s_controller_lives(orch: Type, sites: Sites) -> None:
    run = sites.run(FAR)
    sites.alone()
    sites.controller(FAR)
    assert orch("wait", run, "--timeout", "0.1").code == 124


@pytest.mark.parametrize("lives", [True, False])
def test_a_request_waits_for_the_run_s_own_controller(
    orch: Type, sites: Sites, lives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.cli.runs.cancel_resume.ANSWER_TIMEOUT", 0.1)
    monkeypatch.setattr(service, "ensure_running", lambda path, kind: False)
    run = sites.run(FAR)
    sites.alone()
    if lives:
        sites.controller(FAR)
    done = orch("cancel", run)
    assert [(ask.run, ask.verb) for ask in sites.store.user_requests()] == [(run, "cancel")]
    assert f"asked; the controller of {FAR} has not answered yet" in done.out
    assert done.code == (0 if lives else 4)
    assert (f"no controller of {FAR} runs" in done.err) is not lives


def test_a_node_of_a_cluster_that_nobody_serves_from_here_is_not_said_to_be_released(orch: Type, sites: Sites) -> None:
    sites.run(FAR)
    now, epoch = time.time(), sites.seeds.epoch
    sites.store.saw_node("n2", FAR, epoch=epoch, now=now, failure="it hung")
    sites.store.exclude_node("n2", FAR, now + 3600, "it hung", epoch=epoch, now=now)
    sites.alone()
    refused = orch("nodes", "release", "n2")
    assert refused.code == 4
    assert "n2: asked; the controller has not answered yet" in refused.out
    assert f"no controller of {FAR} runs" in refused.err


def test_taking_a_run_over_needs_that_no_job_of_it_may_live(
    orch: Type, sites: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert (ask.verb, ask.args, started) == ("resume", {"here": HERE}, ["slurm"])


def test_local_runs_belong_to_their_host(orch: Type, seeds: Seeds) -> None:
    assert run_folder.reaches("local", f"local@{socket.gethostname()}")
    assert not run_folder.reaches("local", "local@elsewhere")
    there = run_folder.RunLocation(run="a-1", scheduler="local@elsewhere", reached=False, lives=False)
    assert there.place == "on elsewhere"


@pytest.fixture
def silent_slurm(seeds: Seeds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell in which Slurm's commands are there, and reach nobody; no controller lives."""
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
def test_a_request_that_waits_for_a_silent_slurm_says_so(orch: Type, seeds: Seeds, verb: str, state: RunState) -> None:
    run = next(run.name for run in seeds.store.runs() if run.state is state)
    words = ("nodes", "exclude", "n1") if verb == "nodes" else (verb, run)
    said = orch(*words, "--no-controller")
    told = " ".join(said.err.split())
    assert said.code == 5, said
    assert "warning: slurm does not answer from here" in told
    assert "SLURM_CONF is not set): the request stands; in a shell where `sinfo` answers" in told
    assert "asked; the controller has not answered yet" in said.out
    assert len(seeds.store.user_requests()) == 1


@pytest.mark.usefixtures("silent_slurm")
def test_a_run_that_was_never_given_to_a_silent_slurm_is_cancelled(orch: Type, seeds: Seeds) -> None:
    new = replace(seeds.new("fresh"), cluster="slurm")
    run = seeds.store.create_run(new, now=time.time(), nonce="0123abcd")[0].name
    said = orch("cancel", run, "--no-controller")
    assert (said.code, seeds.store.run(run).state) == (0, RunState.CANCELLED), said
    assert orch("rm", run, "-y").code == 0


@pytest.mark.usefixtures("silent_slurm")
@pytest.mark.parametrize("verb", ["cancel", "resume"])
def test_nothing_is_asked_for_that_nobody_could_ever_do(orch: Type, seeds: Seeds, verb: str) -> None:
    """A registry that was made anew from a folder without a record: no cluster is known, and none answers."""
    run = next(run.name for run in seeds.store.runs() if run.state is RunState.HELD)
    Sites(seeds).belongs(run, "")
    said = orch(verb, run, "--no-controller")
    assert said.code == 5, said
    assert f"it is not known which cluster has the jobs of {run}" in said.err
    assert "in a shell where `sinfo` answers, type the same again" in " ".join(said.err.split())
    assert seeds.store.user_requests() == []


def test_a_run_of_no_known_cluster_is_cancelled_by_way_of_this_one(
    orch: Type, seeds: Seeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.cli.runs.cancel_resume._key_here", lambda kind, must: HERE)
    run = Sites(seeds).run("", RunState.HELD)
    said = orch("cancel", run)
    assert said.code == 4
    assert f"if it is this one ({HERE}): `orch resume {run} --here`, then" in " ".join(said.err.split())
    assert seeds.store.user_requests() == []
