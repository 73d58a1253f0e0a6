"""Configuration files of the lab."""

import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ports:
    """Ports of the daemons."""

    controller: int
    accounting: int
    database: int
    nodes: tuple[int, ...] = ()


def slurm_conf(folder: Path, nodes: list[str], ports: Ports, cpus: int) -> str:
    """Return slurm.conf: no cgroups or systemd, several nodes on one host, fast detection of dead nodes."""
    host = socket.gethostname().partition(".")[0]
    lines = [
        "ClusterName=lab",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={ports.controller}",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={folder}/munge/socket",
        "CredType=cred/munge",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool/%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd-%n.pid",
        f"SlurmctldLogFile={folder}/log/slurmctld.log",
        f"SlurmdLogFile={folder}/log/slurmd-%n.log",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        "MpiDefault=none",
        "ReturnToService=2",
        "SlurmdTimeout=10",
        "SlurmdParameters=config_overrides",
        "InactiveLimit=0",
        "KillWait=5",
        "MinJobAge=30",
        "MessageTimeout=10",
        "SchedulerType=sched/backfill",
        "SchedulerParameters=sched_interval=1,bf_interval=2",
        "JobAcctGatherType=jobacct_gather/linux",
        "AccountingStorageType=accounting_storage/slurmdbd",
        "AccountingStorageHost=127.0.0.1",
        f"AccountingStoragePort={ports.accounting}",
        f"AccountingStoragePass={folder}/munge/socket",
        "AccountingStoreFlags=job_comment",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
    ]
    for node, port in zip(nodes, ports.nodes, strict=True):
        lines.append(f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=4000")
    every = ",".join(nodes)
    lines.append(f"PartitionName=low Nodes={every} Default=YES MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE")
    lines.append(f"PartitionName=high Nodes={every} MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF")
    return "\n".join(lines) + "\n"


RENAMING = """
function slurm_job_submit(job_desc, part_list, submit_uid)
  if job_desc.partition == "high" and job_desc.name ~= nil and string.sub(job_desc.name, 1, 5) == "orch-" then
    job_desc.name = "site-job"
    job_desc.comment = "managed by the site"
  end
  return slurm.SUCCESS
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
  return slurm.SUCCESS
end

return slurm.SUCCESS
"""
"""job_submit.lua of a site that changes names and comments of orch's jobs in one partition."""


def slurmdbd_conf(folder: Path, ports: Ports, password: str) -> str:
    """Return slurmdbd.conf, which slurmdbd accepts only if other users cannot read it."""
    host = socket.gethostname().partition(".")[0]
    return "\n".join(
        [
            "AuthType=auth/munge",
            f"AuthInfo=socket={folder}/munge/socket",
            f"DbdHost={host}",
            "DbdAddr=127.0.0.1",
            f"DbdPort={ports.accounting}",
            "SlurmUser=root",
            f"PidFile={folder}/slurmdbd.pid",
            f"LogFile={folder}/log/slurmdbd.log",
            "StorageType=accounting_storage/mysql",
            "StorageHost=127.0.0.1",
            f"StoragePort={ports.database}",
            "StorageUser=slurm",
            f"StoragePass={password}",
            "StorageLoc=slurm_acct_db",
            "",
        ]
    )
