"""Clocks that disagree, and shared memory that is too small."""

import resource
import shutil
import time
from types import SimpleNamespace

import pytest

from trainer.agent.nodes import preflight
from trainer.protocol.config import JobConfig
from trainer.protocol.config_sections.fault_detection_config import PreflightConfig
from trainer.protocol.config_sections.recipe_config import ClusterShape
from trainer.protocol.failures.outcome import FailureKind
from trainer.protocol.messages.agents import PreflightFault


@pytest.mark.parametrize(
    ("ahead", "kind", "node", "reason"),
    [
        ({}, None, None, ""),
        ({"a": 500.0}, None, None, ""),
        ({"a": 0.0, "b": 1.0, "c": -20.0}, None, None, ""),
        ({"a": 0.0, "b": 1.0, "c": 60.0}, FailureKind.NODE_SUSPECT, "c", "c: its clock is 59 s ahead of the median"),
        ({"a": 0.0, "b": -40.0, "c": 1.0}, FailureKind.NODE_SUSPECT, "b", "b: its clock is 40 s behind the median"),
        # The coordinator's own clock may be the wrong one.
        ({"a": 0.0, "b": 99.0, "c": 100.0}, FailureKind.NODE_SUSPECT, "a", "a: its clock is 99 s behind the median"),
        ({"a": 0.0, "b": 31.0}, FailureKind.UNKNOWN, None, "the clocks of a and b are 31 s apart, above 30 s"),
    ],
)  # fmt: skip
def test_the_node_whose_clock_is_furthest_from_the_others_is_blamed(ahead, kind, node, reason):
    failure = preflight.skew(ahead, PreflightConfig())
    assert (failure and failure.kind) == kind
    assert (failure and failure.node) == node
    assert failure is None or failure.reason.startswith(reason)


@pytest.mark.parametrize(
    ("of_files", "kind", "node"),
    [
        ({"a": 0.0, "b": 3600.0}, FailureKind.NODE_SUSPECT, "b"),
        ({"a": -3600.0, "b": 0.0}, FailureKind.NODE_SUSPECT, "a"),
        ({"a": 7200.0, "b": 10800.0}, FailureKind.UNKNOWN, None),  # the file server may be wrong
        ({"a": 0.0, "b": 0.0}, FailureKind.UNKNOWN, None),  # it dates files by the writer's clock
        ({"a": 0.0, "b": None}, FailureKind.UNKNOWN, None),
        ({}, FailureKind.UNKNOWN, None),
    ],
)
def test_of_two_nodes_the_one_that_agrees_with_the_file_server_is_right(of_files, kind, node):
    failure = preflight.skew({"a": 0.0, "b": 3600.0}, PreflightConfig(), of_files)
    assert (failure.kind, failure.node) == (kind, node)
    assert node is None or f"{node}: its clock is 3600 s " in failure.reason
    assert node is None or "the file server's, with which the clock of" in failure.reason


def test_nodes_that_agree_are_not_blamed_for_the_clock_of_the_file_server():
    assert preflight.skew({"a": 0.0, "b": 1.0}, PreflightConfig(), {"a": 7200.0, "b": 7201.0}) is None
    assert preflight.skew({"a": 0.0}, PreflightConfig(), {"a": 7200.0}) is None


def test_a_clock_is_measured_against_the_file_that_was_just_written(tmp_path, monkeypatch):
    assert preflight.ahead_of_files(tmp_path) == 0.0
    real = time.time
    monkeypatch.setattr(preflight.time, "time", lambda: real() + 3600.0)
    assert preflight.ahead_of_files(tmp_path) == pytest.approx(3600.0, abs=30.0)
    assert preflight.ahead_of_files(tmp_path / "gone" / "gone") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("free", "gpus", "faults"), [(0, 0, 0), (31 << 20, 2, 1), (32 << 20, 2, 0)])
def test_shared_memory_must_hold_what_nccl_puts_there(tmp_path, monkeypatch, free, gpus, faults):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    monkeypatch.setattr(preflight, "_devices", lambda wanted: None)
    monkeypatch.setattr(preflight, "_broken_devices", lambda wanted: None)
    found = preflight.examine(tmp_path, JobConfig(cluster=ClusterShape(ranks_per_node=2, gpus_per_node=gpus)))
    assert [fault.check for fault in found] == ["shared memory"] * faults
    assert all(fault.reason == "/dev/shm has 31 MiB free, below 32 MiB for 2 rank(s) with GPUs" for fault in found)


@pytest.mark.parametrize(("gpus", "faults"), [(0, []), (1, ["/dev/shm is missing or not writable"])])
def test_shared_memory_that_is_read_only_matters_with_gpus_alone(tmp_path, monkeypatch, gpus, faults):
    monkeypatch.setattr(preflight, "_SHARED_MEMORY", tmp_path / "none")
    monkeypatch.setattr(preflight, "_devices", lambda wanted: None)
    monkeypatch.setattr(preflight, "_broken_devices", lambda wanted: None)
    found = preflight.examine(tmp_path, JobConfig(cluster=ClusterShape(gpus_per_node=gpus)))
    assert [fault.reason for fault in found] == faults


LOW = PreflightFault(check="open files", reason="open-files limit is 64, below 1024", shared=True)


@pytest.mark.parametrize(
    ("faults", "kind", "node", "reason"),
    [
        ({"a": [LOW]}, FailureKind.INSTALLATION, None, "on every node: open-files limit is 64, below 1024; raise it"),
        ({"a": [LOW], "b": [LOW]}, FailureKind.INSTALLATION, None, "on every node: open-files limit is 64"),
        ({"a": [], "b": [LOW]}, FailureKind.NODE_SUSPECT, "b", "b: open-files limit is 64, below 1024, while 1 of 2"),
    ],
)
def test_a_limit_that_all_nodes_have_is_the_submitters_and_blames_no_node(faults, kind, node, reason):
    """Slurm passes the limits of the shell that submits on to the job."""
    failure = preflight.find_blamed_node(faults)
    assert (failure.kind, failure.node) == (kind, node)
    assert failure.reason.startswith(reason)


def test_a_hard_limit_on_open_files_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (32, 64))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    assert preflight.examine(tmp_path, JobConfig()) == [LOW]
