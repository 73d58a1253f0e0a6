"""Where an agent finds itself."""

import os

import pytest

from trainer.protocol.node_identity import discover, local_job_id


def test_on_a_slurm_node():
    identity = discover({"SLURM_JOB_ID": "77", "SLURM_NODEID": "1", "SLURM_NNODES": "4", "SLURMD_NODENAME": "n7"})
    assert (identity.kind, identity.job_id, identity.node, identity.nodes, identity.name, identity.restarts) == (
        "slurm",
        "77",
        1,
        4,
        "n7",
        0,
    )


@pytest.mark.parametrize(
    ("address", "pattern", "switches"),
    [
        ("s0.s4.node7", "switch.switch.node", ("s0", "s4")),
        ("s[0-1].s4.node7", "switch.switch.node", ("s[0-1]", "s4")),
        ("s0.gpu7.site.example", "switch.node", ("s0",)),
        ("gpu7.site.example", "node", ()),  # no plugin for the topology
        ("node7", "switch.switch.node", ()),
        ("s0.s4.node7", "", ()),
        ("", "", ()),
    ],
)
def test_the_switches_that_lead_to_a_slurm_node(address, pattern, switches):
    environ = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    identity = discover({"SLURM_JOB_ID": "77", "SLURM_NODEID": "1", **environ})
    assert identity.switches == switches


def test_a_requeued_job_is_told():
    identity = discover({"SLURM_JOB_ID": "77", "SLURM_NODEID": "0", "SLURM_RESTART_COUNT": "2"})
    assert identity.restarts == 2


def test_a_simulated_node_of_this_machine():
    pid = os.getpid()
    environ = {
        "SUBMITIT_LOCAL_JOB_ID": str(pid), "SUBMITIT_LOCAL_GLOBALID": "1", "SUBMITIT_LOCAL_NTASKS": "2",
        "SLURM_JOB_ID": "77", "SLURM_NODEID": "0",
    }  # fmt: skip
    identity = discover(environ)
    assert (identity.kind, identity.node, identity.nodes, identity.name) == ("local", 1, 2, "local-1")
    assert identity.job_id == local_job_id(pid)
    assert identity.job_id.startswith(f"{pid}-")


def test_a_local_identity_stays_and_tells_processes_apart():
    assert local_job_id(os.getpid()) == local_job_id(os.getpid())
    assert local_job_id(os.getpid()) != local_job_id(os.getppid())


def test_outside_a_job():
    with pytest.raises(RuntimeError, match="not inside a job"):
        discover({})
