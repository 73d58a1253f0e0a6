"""Accounts, QOS and limits of a lab, and jobs that wait for each: `python -m tests.slurm.accounts [PREFIX...]`.

Prints Slurm's answers about these jobs as JSON, to be kept in tests/fakes/slurm_limits/VERSION.json. PREFIX is a
command that runs another one on the cluster, which has four nodes of at least 4 CPUs, and `CONF` in its slurm.conf.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from orchestrator.scheduler.slurm.fair_share import SPRIO_FORMAT, SSHARE_FIELDS

CONF = """
PriorityType=priority/multifactor
PriorityWeightFairshare=100000
PriorityWeightAge=1000
PriorityWeightQOS=10000
PriorityWeightPartition=5000
PriorityDecayHalfLife=1-0
PriorityCalcPeriod=1
AccountingStorageEnforce=associations,limits,qos
"""
SETUP = (
    "add qos debug set GrpTRES=cpu=6", "add qos solo set MaxTRESPU=cpu=6", "add qos urgent set Priority=100",
    "add account poor Fairshare=1", "add account rich Fairshare=9", "add account capped set GrpTRES=cpu=6",
    "add account below parent=capped", "add user root account=poor,rich,capped,below qos=normal,debug,solo,urgent",
    "modify user root where account=rich set MaxJobs=1",
)  # fmt: skip
"""Words after `sacctmgr -i`."""

Ask = Callable[..., subprocess.CompletedProcess[str]]
WAITS: dict[str, tuple[str, tuple[tuple[str, ...], ...]]] = {
    "qos": ("QOSGrpCpuLimit", (("-A", "poor", "-q", "debug", "-c", "4"),) * 2),
    "qos for a user": ("QOSMaxCpuPerUserLimit", (("-A", "poor", "-q", "solo", "-c", "4"),) * 2),
    "account": ("AssocGrpCpuLimit", (("-A", "below", "-c", "4"),) * 2),
    "association": ("AssocMaxJobsLimit", (("-A", "rich"),) * 2),
    "priority": ("Priority", (
        ("-A", "rich", "-N", "4", "--exclusive"), ("-A", "rich", "-N", "4", "--exclusive", "-q", "urgent"),
        ("-A", "poor", "-N", "4", "--exclusive"),
    )),
}  # fmt: skip
"""Reason and sbatch options of the jobs that lead to it; the last job waits. MaxJobs is lifted for `priority`."""


def setup(ask: Ask) -> None:
    """Add the accounts and QOS."""
    for words in SETUP:
        done = ask("sacctmgr", "-i", *words.split())
        said = done.stdout + done.stderr
        assert done.returncode == 0 or "Already existing" in said or "othing" in said, f"{words}: {said}"


def make_wait(ask: Ask, name: str) -> str:
    """Submit the jobs of one entry of WAITS, wait for the reason, and return the waiting job's id."""
    reason, jobs = WAITS[name]
    if name == "priority":
        ask("sacctmgr", "-i", "modify", "user", "root", "where", "account=rich", "set", "MaxJobs=-1")
    ids = []
    for options in jobs:
        done = ask("sbatch", "--parsable", "-o", "/dev/null", *options, "--wrap", "sleep 600")
        assert done.returncode == 0, done.stderr
        ids.append(done.stdout.strip())
        if len(ids) < len(jobs) and len(ids) == 1:
            _until(lambda: ask("squeue", "-h", "-j", ids[0], "-o", "%T").stdout.strip() == "RUNNING", f"{ids[0]} runs")
    _until(lambda: ask("squeue", "-h", "-j", ids[-1], "-o", "%r").stdout.strip() == reason, f"{ids[-1]} {reason}")
    return ids[-1]


def end_waits(ask: Ask) -> None:
    ask("scancel", "-u", "root")
    _until(lambda: not ask("squeue", "-h").stdout.strip(), "an empty queue")
    ask("sacctmgr", "-i", "modify", "user", "root", "where", "account=rich", "set", "MaxJobs=1")


def _until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.2)


def record(ask: Ask) -> dict[str, Any]:
    """Return Slurm's answers about one waiting job of each kind."""
    shares = ("sshare", "-h", "-P", "-A", "rich", "-u", "root", "-o", "FairShare")
    _until(lambda: any(map(_is_positive, ask(*shares).stdout.split())), "fair shares", 150)  # computed once a minute
    found: dict[str, Any] = {"version": ask("sbatch", "--version").stdout.strip()}
    for name, (reason, _) in WAITS.items():
        job = make_wait(ask, name)
        account, qos = ask("squeue", "-h", "-j", job, "-O", "Account:30,QOS:30").stdout.split()
        commands = {
            "priorities": ["sprio", "-h", "-p", "low", "-o", SPRIO_FORMAT],
            "shares": ["sshare", "-h", "-P", "-A", account, "-u", "root", "-o", ",".join(SSHARE_FIELDS)],
            "qos": ["scontrol", "show", "assoc_mgr", "flags=qos", f"qos={qos}", "users=root"],
            "associations": ["scontrol", "show", "assoc_mgr", "flags=assoc", f"accounts={account},capped"],
        }
        answers = {key: ask(*command) for key, command in commands.items()}
        found[name] = {
            "job": job, "reason": reason,
            **{key: {"exit": one.returncode, "out": one.stdout, "err": one.stderr} for key, one in answers.items()},
        }  # fmt: skip
        end_waits(ask)
    return found


def _is_positive(text: str) -> bool:
    return text.replace(".", "").isdigit() and float(text) > 0


def main(prefix: list[str]) -> None:
    """Set up the cluster behind the prefix and print its answers."""

    def ask(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*prefix, *command], capture_output=True, text=True, check=False, timeout=60)

    setup(ask)
    sys.stdout.write(json.dumps(record(ask), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
