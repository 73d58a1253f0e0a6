"""`orch nodes exclude` and what `orch nodes ls` says of it."""

import os
import pwd
import time
from subprocess import CompletedProcess
from typing import Any

import pytest

from orchestrator.cli.cluster import nodes
from orchestrator.controller.actor import Actor
from orchestrator.controller.user_requests import answer_idle
from orchestrator.observed_since import Clock, ObservedSince
from orchestrator.registry.records import UNTIL_RELEASED, NewRun
from orchestrator.scheduler import available_schedulers
from orchestrator.scheduler.slurm import slurm_scheduler
from tests.orchestrator.cli.conftest import Seeds, Type

CLUSTER = "lab@login1:6817/0badcafe"


@pytest.fixture(autouse=True)
def controller(seeds: Seeds, monkeypatch: pytest.MonkeyPatch) -> None:
    def wake(*_: Any, **__: Any) -> None:
        actor = Actor(seeds.store, {}, Clock(), ObservedSince(time.monotonic))
        lease = seeds.store.lease()
        assert lease is not None
        actor.start_pass(lease)
        answer_idle(actor)

    monkeypatch.setattr("orchestrator.cli.runs.cancel_resume.wake_controller", wake)


def used(seeds: Seeds, *names: str) -> None:
    new = NewRun(
        slug="big", cluster="slurm", root=seeds.root, config_digest=seeds.digest, total_steps=200, identity={},
        scheduler=CLUSTER,
    )  # fmt: skip
    seeds.store.create_run(new, now=time.time(), nonce="0123abcd")
    for name in names:
        seeds.store.saw_node(name, CLUSTER, epoch=seeds.epoch, now=time.time())


def test_excluded_node_has_author_and_reason(orch: Type, seeds: Seeds, monkeypatch: pytest.MonkeyPatch) -> None:
    used(seeds, "n1", "n2")
    monkeypatch.setattr(nodes, "own_name", lambda: "ada")
    monkeypatch.setattr(nodes.socket, "gethostname", lambda: "login2")
    began = time.time()
    said = orch("nodes", "exclude", "n2", "--for", "2h", "--why", "its  InfiniBand\tdrops", "--json")
    (row,) = said.data
    assert row["node"] == "n2"
    assert row["answer"].startswith("n2 is excluded until ")
    first, second = orch("nodes", "ls", "--json").data
    assert (first["node"], first["excluded_by"], first["excluded_until"]) == ("n1", None, None)
    assert (second["excluded_by"], second["reason"]) == ("person", "excluded by ada@login2: its InfiniBand drops")
    (node,) = [node for node in seeds.store.nodes() if node.name == "n2"]
    assert node.excluded_until == pytest.approx(began + 7200, abs=60)
    assert list(second)[-1] == "excluded_by", "keys are only added at the end"


def test_exclusion_without_time(orch: Type, seeds: Seeds) -> None:
    used(seeds, "n2", "n3")
    assert orch("nodes", "exclude", "n[2-3]").out.splitlines() == [
        "n2 is excluded until it is released", "n3 is excluded until it is released",
    ]  # fmt: skip
    assert {node.excluded_until for node in seeds.store.nodes()} == {UNTIL_RELEASED}
    assert orch("nodes", "ls").out.count("3000-01-01") == 2
    assert orch("nodes", "release", "n2").out == "n2 may be used again\n"
    kept = {row["node"]: row["excluded_by"] for row in orch("nodes", "ls", "--json").data}
    assert kept == {"n2": None, "n3": "person"}


def test_unused_node_was_never_seen(orch: Type, seeds: Seeds) -> None:
    now = time.time()
    seeds.store.exclude_node("n9", CLUSTER, now + 3600, "excluded by ada", epoch=seeds.epoch, now=now)
    (row,) = orch("nodes", "ls", "--json").data
    assert (row["attempts"], row["first_seen"], row["last_seen"]) == (0, None, None)
    seeds.store.saw_node("n9", CLUSTER, epoch=seeds.epoch, now=now)
    (row,) = orch("nodes", "ls", "--json").data
    assert row["last_seen"] is not None


def test_exclusion_by_orch_keeps_its_reason(orch: Type, seeds: Seeds) -> None:
    used(seeds, "n2")
    now, epoch = time.time(), seeds.epoch
    seeds.store.exclude_node("n2", CLUSTER, now + 3600, "node_lost in tiny-1/1", epoch=epoch, now=now)
    seeds.store.saw_node("n2", CLUSTER, epoch=epoch, now=now, failure="hang in tiny-2/1")
    (row,) = orch("nodes", "ls", "--json").data
    assert (row["excluded_by"], row["reason"], row["failures"]) == ("orch", "node_lost in tiny-1/1", 1)
    seeds.store.release_node("n2", CLUSTER, "released by a person", epoch=epoch, now=now)
    seeds.store.saw_node("n2", CLUSTER, epoch=epoch, now=now + 1, failure="hang in tiny-2/1")
    (row,) = orch("nodes", "ls", "--json").data
    assert (row["excluded_by"], row["reason"]) == (None, "hang in tiny-2/1")


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("n2", "--for", "soon"), 2, "'soon' is not a time"),
        (("n2", "--for", "0h"), 2, "0.0 is not in the range x>0"),
        (("n[2",), 2, "n[2': not a host list"),
        (("n[1-100001]",), 2, "NODE='n[1-100001]': more than 100000 nodes"),
        (("n[1-60000]", "m[1-60000]"), 2, "NODE='m[1-60000]': more than 100000 nodes"),
        (("n7",), 3, "no run has used node n7, and no Slurm here has it"),
    ],
)
def test_what_cannot_be_excluded_is_refused(
    orch: Type, seeds: Seeds, words: tuple[str, ...], code: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(available_schedulers, "kinds", lambda: ("local",))
    used(seeds, "n2")
    said = orch("nodes", "exclude", *words)
    assert (said.code, told in said.err) == (code, True), said.err
    assert not any(node.excluded_until for node in seeds.store.nodes())


def test_simulated_nodes_are_this_machine(orch: Type, seeds: Seeds) -> None:
    seeds.store.saw_node("local-0", "local@here", epoch=seeds.epoch, now=time.time())
    said = orch("nodes", "exclude", "local-0")
    assert said.code == 4
    assert "local-0 is a simulated node" in said.err


def test_unused_node_is_found_in_slurm(orch: Type, seeds: Seeds, monkeypatch: pytest.MonkeyPatch) -> None:
    used(seeds)

    def sinfo(command: list[str], *_: Any) -> CompletedProcess[str]:
        assert command[0] == "sinfo"
        return CompletedProcess(command, 0, "n9\n" if "n9" in command else "", "")

    monkeypatch.setattr(available_schedulers, "kinds", lambda: ("slurm", "local"))
    monkeypatch.setattr(slurm_scheduler, "run_command", sinfo)
    monkeypatch.setattr(available_schedulers, "make_instance", lambda kind: lambda: CLUSTER)
    assert orch("nodes", "exclude", "n8").code == 3
    assert orch("nodes", "exclude", "n9").out == "n9 is excluded until it is released\n"
    monkeypatch.setattr(available_schedulers, "make_instance", lambda kind: lambda: "other@head:6817/0badcafe")
    seeds.store.release_node("n9", CLUSTER, "", epoch=seeds.epoch, now=time.time())
    assert orch("nodes", "exclude", "n9").code == 0, "the registry knows where it is"


def test_exclusion_needs_a_run_of_the_cluster(orch: Type, seeds: Seeds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_find_cluster", lambda name: CLUSTER)
    said = orch("nodes", "exclude", "n9")
    assert said.code == 4
    assert "cluster.exclude=n9 in a configuration" in said.err


def test_user_without_account_is_named_by_uid(orch: Type, seeds: Seeds, monkeypatch: pytest.MonkeyPatch) -> None:
    used(seeds, "n2")
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert orch("nodes", "exclude", "n2", "--json").code == 0
    (row,) = orch("nodes", "ls", "--json").data
    assert row["reason"].startswith(f"excluded by {os.getuid()}@")
