"""Bob's program: builds a folder that looks like Ann's run, with his code wherever code could run.

Arguments: the folder, the run's name, the folder for marks of executed code, and the job name from squeue.
"""

import json
import pickle
import sys
import time
from pathlib import Path


class Mark:
    """Object that creates a file when it is unpickled."""

    def __init__(self, folder: str, name: str) -> None:
        self.code = f"import pathlib; pathlib.Path({folder!r}, {name!r}).touch()"

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, (self.code,)


def put(path: Path, data: bytes | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())


def main(place: str, name: str, executed: str, job_name: str) -> None:
    run, now = Path(place), time.time()
    nonce = job_name.rpartition("-")[2]
    attempt, submission = run / "attempts" / "001", run / "attempts" / "001" / "submission"
    program = Mark(executed, "program").code
    config = {"name": name, "command": ["bash", "-c", f"touch {executed}/command"], "env": {"LD_PRELOAD": "/x.so"}}
    put(run / "config.json", json.dumps(config))
    known = {"schema": "orch.run/1", "name": name, "cluster": "local", "created_at": now, "total_steps": 5}
    put(run / "run.json", json.dumps({**known, "nonce": nonce, "config_digest": "", "identity": {}, "scheduler": ""}))
    go = {"schema": "orch.go/1", "attempt": 1, "epoch": 99, "job_id": "1", "nonce": nonce}
    put(attempt / "GO", json.dumps(go))
    ended = {"attempt": 1, "job_id": "1", "result": "finished", "reason": "says Bob", "exit_code": 0, "step": 5}
    put(attempt / "outcome.json", json.dumps({"schema": "orch.outcome/1", **ended, "started_at": now, "ended_at": now}))
    put(run / "requests" / "stop.001.00000000.json", json.dumps({"kind": "stop", "attempt": 1, "reason": "Bob"}))
    for job in range(1, 4):
        put(submission / f"{job}_submitted.pkl", pickle.dumps(Mark(executed, "payload")))
    put(submission / "local-job.json", json.dumps({"pid": 1, "job_id": "1-1", "boot": "", "space": ""}))
    for folder in (run, submission, run / "code" / "0"):
        for module in ("sitecustomize", "usercustomize", "submitit", "trainer", "torch", "json"):
            put(folder / f"{module}.py", program)
    checkpoint = run / "checkpoints" / f"step-00000004.001-{nonce}"
    put(checkpoint / "__0_0.distcp", pickle.dumps(Mark(executed, "checkpoint")))
    put(checkpoint / ".metadata", pickle.dumps(Mark(executed, "metadata")))
    put(checkpoint / "manifest.json", "{}")
    put(checkpoint / "COMMIT", "{}")


if __name__ == "__main__":
    main(*sys.argv[1:])
