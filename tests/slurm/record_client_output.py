"""Print the output of Slurm's clients about jobs of every kind as JSON, for the Slurm that SLURM_CONF selects.

Run as root on an idle cluster of four nodes n1-n4 with the partitions `low` and `high` (tests/slurm/lab.py):
`python -m tests.slurm.record_client_output > tests/fakes/slurm_output/VERSION.json`. It takes two minutes.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

from orchestrator.scheduler.slurm.command_output import (
    SACCT_FIELDS,
    SACCT_FORMAT,
    SEPARATOR,
    SQUEUE_FIELDS,
    SQUEUE_FORMAT,
    query_environment,
)

Row = dict[str, str]

ENDING = {
    "succeeds": "true", "exits-3": "exit 3", "exits-137": "exit 137", "exits-128": "exit 128",
    "is-killed": "kill -9 $$", "is-terminated": "kill -15 $$",
}  # fmt: skip
"""Scripts by job name."""
NAMED_IN_CONFIG = ("ClusterName", "SlurmctldHost", "SlurmctldPort", "StateSaveLocation", "AccountingStorageType")
"""Recorded lines of `scontrol show config`."""


def ask(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=query_environment(os.environ)
    )


def answer(*command: str) -> dict[str, str | int]:
    done = ask(*command)
    return {"command": " ".join(command), "exit": done.returncode, "stdout": done.stdout, "stderr": done.stderr}


def submit(name: str, script: str, *options: str) -> str:
    done = ask(
        "sbatch", "--parsable", "-J", name, "-o", "/dev/null", "--comment", f"orch:{name}", *options, "--wrap", script
    )
    if done.returncode:
        sys.stderr.write(f"{name}: {done.stderr}")
    return done.stdout.strip().partition(";")[0]


def queue() -> list[Row]:
    text = ask("squeue", "-h", "-a", "--me", "-t", "all", "-O", SQUEUE_FORMAT).stdout
    return [as_row(line, [name for name, _ in SQUEUE_FIELDS]) for line in text.splitlines()]


def accounting() -> list[Row]:
    shape = ["sacct", "-X", "-D", "-n", "-p", "--delimiter", SEPARATOR, "-o", SACCT_FORMAT, "-u", str(os.getuid())]
    return [as_row(line, list(SACCT_FIELDS)) for line in ask(*shape, "-S", "now-1hours").stdout.splitlines()]


def as_row(line: str, names: list[str]) -> Row:
    """Return the fields without padding."""
    fields = line.split(SEPARATOR)
    assert len(fields) == len(names) + 1, line
    return {name: value.strip() for name, value in zip(names, fields[:-1], strict=True)}


def until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            sys.stderr.write(f"not within {seconds:.0f} s: {what}\n")
            return
        time.sleep(0.3)


def state_of(job: str) -> str:
    return ask("squeue", "-h", "-a", "-t", "all", "-j", job, "-O", "State:32").stdout.strip()


def start(name: str, *options: str) -> str:
    job = submit(name, "sleep 600", *options)
    until(lambda: state_of(job) == "RUNNING", f"{name} runs")
    return job


def record() -> dict[str, object]:
    found: dict[str, object] = {"version": ask("sbatch", "--version").stdout.strip()}
    asked: dict[str, object] = {}
    slow = start("reaches-its-limit", "--time=1", "-w", "n1", "-n1", "--no-requeue")
    start("runs", "--time=10", "-w", "n1", "-n1")
    start("has-no-limit", "-w", "n1", "-n1")
    held = submit("is-held", "true", "--hold", "--no-requeue")
    submit("waits", "true", "-N4", "--exclusive")
    submit("asks-for-too-much", "true", "-N99")
    submit("is-an-array", "true", "--hold", "--array=1-3%1")
    ask("sbatch", "-J", "is-heterogeneous", "--hold", "-o", "/dev/null", "-n1", ":", "-n1", "--wrap", "true")
    gone = submit("is-cancelled-while-it-waits", "true", "--hold")
    ended = [submit(name, script, "-w", "n2", "-n1", "--no-requeue") for name, script in ENDING.items()]
    cancelled = start("is-cancelled", "-w", "n2", "-n1")
    ask("scancel", gone, cancelled)
    requeued = [
        start(f"is-requeued-{kind}", "-w", "n3", "-n1", "--no-requeue") for kind in ("plain", "held", "special")
    ]
    for job in requeued:
        asked.setdefault("update requeue", answer("scontrol", "update", f"jobid={job}", "requeue=1"))
    for job in requeued[1:]:
        ask("scontrol", "update", f"jobid={job}", "requeue=1")
    asked["requeue"] = answer("scontrol", "requeue", requeued[0])
    asked["requeuehold"] = answer("scontrol", "requeuehold", requeued[1])
    asked["requeuehold special"] = answer("scontrol", "requeuehold", "state=SpecialExit", requeued[2])
    victim = start("is-preempted", "-w", "n4", "-N1", "--exclusive", "--no-requeue")
    start("preempts", "-w", "n4", "-N1", "--exclusive", "-p", "high")
    until(lambda: all(state_of(job) not in ("RUNNING", "COMPLETING") for job in [*requeued, *ended, victim]), "ends")
    asked["sinfo usable"] = answer("sinfo", "-h", "-a", "-N", "-o", "%N|%P|%c|%m|%G|%T")
    ask("scancel", "-n", "preempts")
    until(lambda: ask("sinfo", "-h", "-n", "n4", "-p", "low", "-o", "%T").stdout.strip() == "idle", "n4 is free")
    lost = start("loses-its-node", "-w", "n4", "-n1", "--no-requeue")
    ask("scontrol", "update", "nodename=n4", "state=down", "reason=test")
    ask("scontrol", "update", "nodename=n3", "state=drain", "reason=test")
    until(lambda: state_of(lost) == "NODE_FAIL", "its node is lost")
    time.sleep(3)
    found["queue"] = queue()
    asked["sinfo states"] = answer("sinfo", "-h", "-a", "-N", "-n", "n[1-4]", "-o", "%N %T")
    asked["sinfo sizes"] = answer("sinfo", "-h", "-a", "-o", "%D %P")
    asked["script"] = answer("scontrol", "write", "batch_script", held, "-")
    asked["script of an unknown job"] = answer("scontrol", "write", "batch_script", "99999", "-")
    asked["release of a held job"] = answer("scontrol", "release", held)
    asked["release of an ended job"] = answer("scontrol", "release", ended[0])
    asked["release of an unknown job"] = answer("scontrol", "release", "99999")
    asked["cancel of an ended job"] = answer("scancel", ended[0])
    asked["cancel of an unknown job"] = answer("scancel", "99999")
    asked["an unknown job"] = answer("squeue", "-h", "-j", "99999", "-O", "JobID")
    asked["unknown jobs"] = answer("squeue", "-h", "-j", "99999,99998", "-O", "JobID")
    asked["accounting of an unknown job"] = answer("sacct", "-X", "-D", "-n", "-p", "-j", "99999")
    config = ask("scontrol", "show", "config").stdout.splitlines(keepends=True)
    asked["config"] = "".join(line for line in config if line.startswith(NAMED_IN_CONFIG))
    time.sleep(4)
    found["accounting"] = accounting()
    ask("scancel", *requeued)
    until(lambda: state_of(slow) == "TIMEOUT", "the time limit", 150)
    found["queue later"] = [row for row in queue() if row["JobID"] in (slow, *requeued)]
    time.sleep(6)
    found["accounting later"] = [row for row in accounting() if row["JobIDRaw"] in (slow, *requeued)]
    ask("scancel", "--me")
    ask("scontrol", "update", "nodename=n[3-4]", "state=resume")
    found["asked"] = asked
    return found


def dump(record: dict[str, object]) -> str:
    """Return JSON with one line for each row of a table."""
    lines = []
    for key, value in record.items():
        rows = ",\n  ".join(json.dumps(row) for row in value) if isinstance(value, list) else ""
        pairs = (
            ",\n  ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            if isinstance(value, dict)
            else ""
        )
        text = f"[\n  {rows}\n ]" if rows else f"{{\n  {pairs}\n }}" if pairs else json.dumps(value)
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    sys.stdout.write(dump(record()))
