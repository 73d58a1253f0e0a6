"""Times, bounds, cores, preflight verdicts and torchrun's variables: pure functions on tables."""

import pytest

from trainer.agent.attempt_state.published_files import AttemptProgress
from trainer.agent.attempt_state.stopping import Bounds, Stopping, bound, classify_signal, lead, parse_time
from trainer.agent.fork_server import launch_order
from trainer.agent.fork_server.rank_binding import Place
from trainer.agent.nodes import preflight
from trainer.agent.nodes.preflight import PreflightFault, examine, find_blamed_node
from trainer.protocol.config import DataConfig, JobConfig
from trainer.protocol.config_sections.recipe_config import ClusterShape
from trainer.protocol.failures.outcome import FailureKind
from trainer.protocol.messages.agents import ProgressReport
from trainer.protocol.messages.ranks import RankSpec
from trainer.protocol.node_identity import NodeIdentity
from trainer.protocol.rank_progress.progress import StopReason


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400), ("1:30", 90), ("1:00:00", 3600), ("2-12", 216000), ("1-00:30", 88200), ("1-01:01:01", 90061),
        ("UNLIMITED", None), ("infinite", None), ("", None),
    ],
)  # fmt: skip
def test_slurms_notation_of_time(text, seconds):
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["1h", "1:2:3:4", "-5", "1-"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(ValueError, match="not in Slurm's notation"):
        parse_time(text)


def test_the_lead_never_takes_most_of_a_short_job():
    assert (lead(3600, 120), lead(100, 120), lead(None, 120)) == (120, 50, 120)


@pytest.mark.parametrize(
    ("name", "kind", "left", "reason"),
    [
        ("SIGUSR2", "slurm", 150, StopReason.TIME_LIMIT),
        ("SIGUSR2", "slurm", 500, StopReason.PREEMPTION),
        ("SIGTERM", "slurm", 500, StopReason.PREEMPTION),
        ("SIGTERM", "slurm", 10, StopReason.TIME_LIMIT),
        ("SIGTERM", "slurm", None, StopReason.PREEMPTION),
        ("SIGUSR2", "local", 500, StopReason.PREEMPTION),
        ("SIGTERM", "local", 500, StopReason.CANCEL),
        ("SIGUSR2", "local", 100, StopReason.TIME_LIMIT),
        ("SIGTERM", "local", 150, StopReason.CANCEL),
    ],
)
def test_why_a_signal_came(name, kind, left, reason):
    assert classify_signal(name, kind=kind, left=left, lead_seconds=120) is reason


@pytest.mark.parametrize(
    ("name", "reason", "end", "until"),
    [
        ("SIGTERM", StopReason.PREEMPTION, None, 120),
        ("SIGTERM", StopReason.PREEMPTION, 115, 110),
        ("SIGUSR2", StopReason.PREEMPTION, None, 160),
        ("", StopReason.CANCEL, 150, 145),
        ("", StopReason.TIME_LIMIT, 400, 395),
        ("SIGTERM", StopReason.TIME_LIMIT, 400, 120),
        ("", StopReason.TIME_LIMIT, 102, 100),
    ],
)
def test_by_when_ranks_must_have_saved(name, reason, end, until):
    assert bound(name, reason, now=100, end=end, bounds=Bounds()) == until


def stopping() -> Stopping:
    return Stopping(kind="slurm", started=0.0, limit="1:00:00", signal_lead=120.0, bounds=Bounds())


def test_the_end_of_the_job_asks_by_itself_and_the_scheduler_may_correct_it():
    stop = stopping()
    assert not stop.is_due(3479)
    assert stop.is_due(3480)
    stop.correct(1000.0)
    assert stop.is_due(880)
    assert stop.on_deadline(880).until == 995
    assert not stop.is_due(990)  # asked already
    assert (stop.is_overdue(994), stop.is_overdue(995)) == (False, True)


@pytest.mark.parametrize(("ahead", "end"), [(0, 3575), (20, 3555), (3600, 3420), (-7200, 3600), (1e9, 3420)])
def test_a_node_whose_clock_is_off_trains_as_long_as_its_job_lasts(ahead, end):
    stop = stopping()
    assert stop.correct(3575.0 - ahead, 3600.0) == stop.end == end
    assert not stop.is_due(3299)


def test_a_job_that_got_more_time_ends_later_and_one_that_is_preempted_sooner():
    stop = stopping()
    assert stop.correct(5390.0, 5400.0) == 5390.0
    assert stop.correct(-9999.0, 7200.0) == 6840.0  # a twentieth is lost
    assert stop.correct(9999.0, 300.0) == 300.0
    assert stop.correct(-9999.0, 86400.0) == 85800.0


def test_a_later_signal_shortens_a_stop_and_keeps_its_reason():
    stop = stopping()
    assert stop.on_signal("SIGUSR2", 100).until == 160
    second = stop.on_signal("SIGTERM", 110)
    assert (second.reason, second.until) == (StopReason.PREEMPTION, 130)
    assert stop.on_request("again", 120).until == 130


def report(**fields) -> list[ProgressReport]:
    return [ProgressReport(**{"generation": 1, "step": 5, "phase": "forward", **fields})]


def test_ranks_that_move_get_their_time_again_when_nobody_presses():
    stop = stopping()
    assert stop.on_request("enough", 100).until == 160
    stop.watch(report(step=6), 150)
    assert stop.stop.until == 210
    stop.watch(report(step=6), 200)  # nothing has moved since
    assert stop.stop.until == 210
    stop.watch(report(step=6, phase="checkpoint"), 205)
    assert stop.stop.until == 265
    assert stop.on_request("again", 210).until == 265
    stop.watch(report(step=6, phase="checkpoint"), 1899)
    assert stop.stop.until == 1900  # a save that hangs does not keep the job


def test_who_presses_gives_no_more_time_than_there_is():
    stop = stopping()
    stop.on_request("enough", 100)
    assert stop.on_signal("SIGTERM", 110).until == 130
    stop.watch(report(step=7), 125)
    assert stop.stop.until == 130
    short = stopping()
    short.correct(300)
    short.on_request("enough", 100)
    short.watch(report(step=8), 290)
    assert short.stop.until == 295
    ending = stopping()
    ending.on_deadline(3500)
    ending.watch(report(step=9), 3590)
    assert ending.stop.until == 3595


def identity(node: int = 0, kind: str = "slurm") -> NodeIdentity:
    return NodeIdentity(kind=kind, job_id="1", node=node, nodes=2, name=f"n{node}")


def test_simulated_nodes_share_one_machines_cores():
    config = JobConfig(cluster=ClusterShape(nodes=2, ranks_per_node=2))
    assert launch_order.place_on_machine(identity(1), config, 1) == Place(first=0, count=2, total=2)
    assert launch_order.place_on_machine(identity(1, "local"), config, 1) == Place(first=2, count=2, total=4)


def test_simulated_nodes_get_their_own_gpus():
    config = JobConfig(cluster=ClusterShape(nodes=2, ranks_per_node=2, gpus_per_node=2))
    visible = {"CUDA_VISIBLE_DEVICES": "3,4,5,6"}
    assert launch_order.gpus(identity(1, "local"), config, visible) == {"CUDA_VISIBLE_DEVICES": "5,6"}
    assert launch_order.gpus(identity(1), config, visible) == {}
    assert launch_order.gpus(identity(1, "local"), config, {"CUDA_VISIBLE_DEVICES": "0,1"}) == {}


FOLDER = PreflightFault(check="run folder", reason="cannot write", shared=True)
FULL = PreflightFault(check="run folder", reason="No space left", shared=True, full=True)
DATA = PreflightFault(check="data", reason="cannot read data.path=/x", shared=True)
SHM = PreflightFault(check="shared memory", reason="/dev/shm is missing", shared=False)


@pytest.mark.parametrize(
    ("faults", "kind", "node"),
    [
        ({"a": [], "b": []}, None, None),
        ({"a": [], "b": [FOLDER]}, FailureKind.NODE_SUSPECT, "b"),
        ({"a": [FOLDER], "b": [FOLDER]}, FailureKind.STORAGE, None),
        ({"a": [], "b": [FULL]}, FailureKind.STORAGE, None),
        ({"a": [DATA], "b": [DATA]}, FailureKind.USER_ERROR, None),
        ({"a": [DATA]}, FailureKind.USER_ERROR, None),
        ({"a": [SHM]}, FailureKind.NODE_SUSPECT, "a"),
        ({"a": [FOLDER], "b": [FOLDER, SHM]}, FailureKind.NODE_SUSPECT, "b"),
    ],
)
def test_a_node_is_blamed_only_for_its_own(faults, kind, node):
    failure = find_blamed_node(faults)
    assert (failure and failure.kind) == kind
    assert (failure and failure.node) == node


def test_a_healthy_node_passes_and_leaves_no_probe(tmp_path):
    assert examine(tmp_path, JobConfig()) == []
    assert list(tmp_path.iterdir()) == []
    missing = JobConfig(data=DataConfig(path=str(tmp_path / "none")))
    (fault,) = examine(tmp_path, missing)
    assert fault.check == "data"
    (fault,) = examine(tmp_path / "gone", JobConfig())
    assert "No such file" in fault.reason


def test_a_node_without_the_named_interface_is_not_fit(tmp_path):
    assert examine(tmp_path, JobConfig(cluster=ClusterShape(interface="lo"))) == []
    (fault,) = examine(tmp_path, JobConfig(cluster=ClusterShape(interface="nowhere0")))
    assert (fault.check, fault.shared) == ("interface", False)
    assert "cluster.interface=nowhere0" in fault.reason


@pytest.mark.parametrize(
    ("driver", "files", "left"),
    [
        ("echo 'GPU 0: X (UUID: a)'; echo 'GPU 1: X (UUID: b)'", 0, None),
        ("echo 'GPU 0: X (UUID: a)'; echo 'Unable to determine the device handle for GPU1'; exit 15", 2, 1),
        ("exec sleep 20", 2, 0),
        (None, 2, None),
        (None, 1, 1),
    ],
)
def test_gpus_are_counted_before_anything_trains(tmp_path, monkeypatch, driver, files, left):
    monkeypatch.setattr(preflight, "_DEVICES", tmp_path)
    monkeypatch.setattr(preflight, "_AMD", tmp_path / "kfd")
    monkeypatch.setattr(preflight, "_DRIVER_SECONDS", 1.0)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin" if driver else str(tmp_path))
    for number in range(files):
        (tmp_path / f"nvidia{number}").touch()
    if driver:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{driver}\n")
        (tmp_path / "nvidia-smi").chmod(0o700)
    faults = examine(tmp_path, JobConfig(cluster=ClusterShape(ranks_per_node=2, gpus_per_node=2)))
    assert [(fault.check, fault.shared) for fault in faults] == ([] if left is None else [("GPUs", False)])
    assert all(fault.reason.startswith(f"{left} GPU(s)") for fault in faults)


def test_a_heartbeat_keeps_what_was_known_through_a_restart():
    standing = AttemptProgress(1, "7", lambda: 5.0)
    standing.merge(report(step=9, loss=2.5, saved=8, total=20, phase="data") + report(step=8))
    standing.merge(2 * report(step=0, phase="init"))
    beat = standing.beat(generation=2, nodes=["a"], state="running")
    assert (beat.step, beat.loss, beat.saved_step, beat.total_steps, beat.phase) == (8, 2.5, 8, 20, "init")
    standing.merge(report(step=5, loss=3.0, phase="data"))
    assert standing.beat(generation=2, nodes=["a"], state="running").step == 5


def test_a_rank_sees_the_variables_of_a_task_of_its_own() -> None:
    """Slurm's own describe the agent: one task per node."""
    spec = RankSpec(
        run_dir="/runs/a-1", attempt=1, generation=1, rank=5, local_rank=1, world_size=8, local_world_size=4, node=1,
        node_name="n2", cell_fd=-1, control_fd=-1, host="n2",
    )  # fmt: skip
    found = launch_order.task_variables(spec, {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"})
    assert {name: found[name] for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS")} == {
        "SLURM_PROCID": 5, "SLURM_LOCALID": 1, "SLURM_NODEID": 1, "SLURM_NTASKS": 8,
    }  # fmt: skip
    assert found["SLURM_TASKS_PER_NODE"] == "4(x2)"
    assert launch_order.task_variables(spec, {}) == {}
