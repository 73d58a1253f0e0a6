"""What a job's script starts on every node: it makes sure of the run directory, then lets submitit load its payload.

`python -P -u -m trainer.agent.start RUN_DIR SUBMISSION`. A payload is a pickle: whoever writes it runs code as the
user. So it is read through the descriptor of a run directory that is the user's own, not by its name.
"""

import os
import sys
from pathlib import Path

from checkpointing.storage.trusted_path import pinned
from trainer.contract.failures.outcome import ExitCode

_WRITABLE_BY_OTHERS = 0o022


def main(arguments: list[str]) -> int:
    """Run the payload, if it may be loaded; an agent ends the process itself."""
    os.umask(os.umask(0o077) | _WRITABLE_BY_OTHERS)  # a site's 0002 would let the group write what is made here
    run_dir, submission = map(Path, arguments)
    try:
        place = pinned(run_dir)
        folder = place / submission.relative_to(run_dir)
        os.chdir(place)
    except OSError as error:
        sys.stderr.write(f"orch-agent: refuses to start: {error.strerror}: {run_dir}\n")
        return ExitCode.NEVER_RETRY
    from submitit.core.submission import process_job

    if place != run_dir:
        _write_log_there(folder)
    process_job(folder)
    return ExitCode.FINISHED


def _write_log_there(folder: Path) -> None:
    """Under Slurm nothing was written by name: see `orchestrator/scheduler/slurm/sbatch.py`. Local jobs have files."""
    if "SLURM_JOB_ID" not in os.environ or os.environ.get("SUBMITIT_EXECUTOR") != "slurm":
        return
    stem = f"{os.environ['SLURM_JOB_ID']}_{os.environ.get('SLURM_PROCID', '0')}_log"
    for descriptor, name in ((1, f"{stem}.out"), (2, f"{stem}.err")):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        opened = os.open(folder / name, flags, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
