"""Clocks that disagree, and shared memory that is too small."""

import resource
import shutil
import time
from importlib import metadata
from types import SimpleNamespace

import pytest

from trainer.agent.nodes import preflight
from trainer.agent.nodes.preflight import complaints, lost_links
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
    assert node is None or "the file server's, which agrees with the clock of" in failure.reason


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
    failure = preflight.find_blamed_node(faults)
    assert (failure.kind, failure.node) == (kind, node)
    assert failure.reason.startswith(reason)


def test_a_hard_limit_on_open_files_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (32, 64))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    assert preflight.examine(tmp_path, JobConfig()) == [LOW]


def test_an_image_that_lacks_a_package_is_found(tmp_path, monkeypatch):
    installed = {"torch": "2.11.0+cu128", "psutil": "7.0"}

    def version(name):
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    (fault,) = preflight.examine(tmp_path, JobConfig())
    failure = preflight.find_blamed_node({"a": [fault], "b": [fault]})
    assert (failure.kind, failure.node) == (FailureKind.INSTALLATION, None)
    assert "has torch 2.11.0+cu128, no xxhash; " in failure.reason
    assert failure.reason.endswith("-m pip install 'torch>=2.12' xxhash")
    assert preflight.examine(tmp_path, JobConfig(command=("python", "train.py"))) == []


HEALTHY = """
    <gpu id="00000000:{bus}:00.0">
        <product_name>NVIDIA H100 80GB HBM3</product_name>
        <gpu_recovery_action>None</gpu_recovery_action>
        <clocks_event_reasons>
            <clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
            <clocks_event_reason_sw_power_cap>Active</clocks_event_reason_sw_power_cap>
            <clocks_event_reason_hw_slowdown>Not Active</clocks_event_reason_hw_slowdown>
            <clocks_event_reason_hw_thermal_slowdown>Not Active</clocks_event_reason_hw_thermal_slowdown>
            <clocks_event_reason_hw_power_brake_slowdown>Not Active</clocks_event_reason_hw_power_brake_slowdown>
            <clocks_event_reason_sw_thermal_slowdown>Not Active</clocks_event_reason_sw_thermal_slowdown>
        </clocks_event_reasons>
        <ecc_errors>
            <volatile>
                <sram_correctable>3</sram_correctable>
                <sram_uncorrectable_parity>0</sram_uncorrectable_parity>
                <sram_uncorrectable_secded>0</sram_uncorrectable_secded>
                <dram_correctable>7</dram_correctable>
                <dram_uncorrectable>0</dram_uncorrectable>
            </volatile>
            <aggregate>
                <dram_uncorrectable>4</dram_uncorrectable>
                <sram_threshold_exceeded>No</sram_threshold_exceeded>
            </aggregate>
        </ecc_errors>
        <remapped_rows>
            <remapped_row_corr>0</remapped_row_corr>
            <remapped_row_unc>2</remapped_row_unc>
            <remapped_row_pending>No</remapped_row_pending>
            <remapped_row_failure>No</remapped_row_failure>
        </remapped_rows>
    </gpu>"""
OLDER = """
    <gpu id="00000000:17:00.0">
        <ecc_errors><volatile><sram_uncorrectable>N/A</sram_uncorrectable></volatile></ecc_errors>
        <remapped_rows>N/A</remapped_rows>
        <clocks_throttle_reasons>
            <clocks_throttle_reason_hw_slowdown>{slow}</clocks_throttle_reason_hw_slowdown>
        </clocks_throttle_reasons>
    </gpu>"""


def report(*gpus: str) -> str:
    return f'<?xml version="1.0" ?>\n<nvidia_smi_log>{"".join(gpus)}\n</nvidia_smi_log>\n'


def sick(tag: str, said: str) -> str:
    """A healthy GPU's report with one word changed: the first of this tag."""
    head, opening, rest = HEALTHY.partition(f"<{tag}>")
    assert opening
    return head + opening + said + rest[rest.index("<") :]


@pytest.mark.parametrize(
    ("tag", "said", "words"),
    [
        ("sram_threshold_exceeded", "Yes", "has exceeded its manufacturer's limit on SRAM errors"),
        ("remapped_row_failure", "Yes", "has no spare rows left for broken memory"),
        ("remapped_row_pending", "Yes", "needs a reset before broken rows of its memory are replaced"),
        ("gpu_recovery_action", "Drain P2P", "requests recovery: drain p2p"),
        ("clocks_event_reason_hw_thermal_slowdown", "Active", "is throttled: it is too hot"),
        ("clocks_event_reason_hw_power_brake_slowdown", "Active", "is throttled: its power supply throttles it"),
    ],
)
def test_what_speaks_against_a_gpu(tag, said, words):
    assert complaints(report(HEALTHY, sick(tag, said))) == [f"GPU 1 {words}"]


def test_corrected_contained_and_remapped_errors_do_not():
    assert complaints(report(HEALTHY, HEALTHY)) == []
    assert complaints(report(sick("dram_uncorrectable", "1"), sick("sram_uncorrectable_parity", "2"))) == []


def test_where_the_report_does_not_say_what_an_error_needs_any_speaks_against_the_gpu():
    volta = """<gpu><ecc_errors><volatile><dram_uncorrectable>1</dram_uncorrectable></volatile></ecc_errors>
        <retired_pages><pending_retirement>{pending}</pending_retirement></retired_pages></gpu>"""
    seen = "GPU 0 has had 1 uncorrected memory error(s) since its driver was loaded"
    assert complaints(report(volta.format(pending="No"))) == [seen]
    reset = "GPU 0 needs a reset before broken pages of its memory are retired"
    assert complaints(report(volta.format(pending="Yes"))) == [seen, reset]


def test_older_drivers_have_other_words():
    assert complaints(report(OLDER.format(slow="Active"))) == ["GPU 0 is throttled: the hardware slows it down"]
    assert complaints(report(OLDER.format(slow="Not Active"))) == []


@pytest.mark.parametrize("said", ["", "No devices were found\n", "<nvidia_smi_log>", "<html/>"])
def test_a_report_that_is_none_says_nothing(said):
    assert complaints(said) == []


def links(*up: int) -> str:
    """A report of GPUs with so many of their links up."""
    most, lines = max(up), list[str]()
    for gpu, count in enumerate(up):
        lines.append(f"GPU {gpu}: NVIDIA (UUID: GPU-{gpu})")
        lines += [f"\t Link {link}: {'25 GB/s' if link < count else '<inactive>'}" for link in range(most)]
    return "\n".join(lines)


LINKS = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-a)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-b)
\t Link 0: 26.562 GB/s
\t Link 1: {second}
"""


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        (LINKS.format(second="26.562 GB/s"), ""),
        (LINKS.format(second="<inactive>"), "GPU 1 has 1 of 2 NVLinks up"),
        (LINKS.format(second="0.000 GB/s"), "GPU 1 has 1 of 2 NVLinks up"),
        (LINKS.replace("26.562 GB/s", "<inactive>").format(second="<inactive>"), ""),
        ("GPU 0: NVIDIA L4 (UUID: GPU-a)\nGPU 1: NVIDIA L4 (UUID: GPU-b)\n", ""),
        (links(4, 4, 0, 0), ""),
        (links(12, 12, 4, 4, 0), ""),
        (links(18, 18, 18, 18, 17, 18, 18, 18), "GPU 4 has 17 of 18 NVLinks up"),
        ("", ""),
    ],
)
def test_a_gpu_with_fewer_links_than_its_neighbours(text, lost):
    assert lost_links(text) == lost


DRIVER = """#!/bin/sh
case "$1" in
-L) echo 'GPU 0: X (UUID: a)'; echo 'GPU 1: X (UUID: b)';;
-q) cat "$(dirname "$0")/report";;
nvlink) cat "$(dirname "$0")/links";;
esac
"""


def test_preflight_refuses_a_node_whose_gpus_are_broken(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "_AMD", tmp_path / "kfd")
    monkeypatch.setattr(preflight, "_LEAST_SHARED", 0)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    (tmp_path / "nvidia-smi").write_text(DRIVER)
    (tmp_path / "nvidia-smi").chmod(0o700)
    (tmp_path / "report").write_text(report(HEALTHY, sick("remapped_row_failure", "Yes")))
    (tmp_path / "links").write_text(LINKS.format(second="<inactive>"))
    config = JobConfig(cluster=ClusterShape(ranks_per_node=2, gpus_per_node=2))
    (fault,) = preflight.examine(tmp_path, config)
    assert (fault.check, fault.shared) == ("GPU health", False)
    assert fault.reason == "GPU 1 has no spare rows left for broken memory; GPU 1 has 1 of 2 NVLinks up"
    (tmp_path / "report").write_text(report(HEALTHY, HEALTHY))
    (tmp_path / "links").write_text(LINKS.format(second="26.562 GB/s"))
    assert preflight.examine(tmp_path, config) == []
