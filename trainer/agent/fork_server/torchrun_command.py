"""Start of an existing torchrun script as a rank."""

import json
import os
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from trainer.protocol.command_progress import FOLDER_VARIABLE
from trainer.protocol.config import JobConfig
from trainer.protocol.rank_progress.rank_messages import place_variables
from trainer.protocol.run_dir import AttemptDir, RunDir
from trainer.protocol.secrets.secret_redaction import LISTED

_INTERPRETERS = ("python", "python3")


def torchrun_environment(
    *, run: RunDir, attempt: AttemptDir, config: JobConfig, node_rank: int, generation: int, local_rank: int,
    master: tuple[str, int], inherited: Mapping[str, str],
) -> dict[str, str]:  # fmt: skip
    """Return torchrun's variables for one rank, plus ours."""
    per_node, world = config.cluster.ranks_per_node, config.cluster.world_size
    rank = node_rank * per_node + local_rank
    threads = inherited.get("OMP_NUM_THREADS") or str(max(1, config.cluster.cpus_per_task // per_node))
    place = place_variables(
        rank=rank, local_rank=local_rank, world_size=world, local_world_size=per_node, node_rank=node_rank,
        generation=generation, run_id=f"{run.name}-{attempt.number}",
    )  # fmt: skip
    variables = {
        **place,
        "MASTER_ADDR": master[0],
        "MASTER_PORT": master[1],
        "TORCHELASTIC_MAX_RESTARTS": config.recovery.restarts_in_place,
        # torch would write the exception's text there unredacted, secrets included; its log has the same information.
        **({} if LISTED in inherited else {"TORCHELASTIC_ERROR_FILE": attempt.error_file(rank, generation)}),
        # The script's own rank 0 hosts the store, a new one in every generation.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "OMP_NUM_THREADS": threads,
        # The last output of a killed rank must be in its log.
        "PYTHONUNBUFFERED": "1",
        "ORCH_RUN": run.name,
        "ORCH_RUN_DIR": run.path,
        "ORCH_ATTEMPT": attempt.number,
        "ORCH_GENERATION": generation,
    }
    path = {"PATH": interpreter_first(inherited.get("PATH", os.defpath))}
    return {**{name: str(value) for name, value in variables.items()}, **path, **config.env}


def with_interpreter(config: JobConfig) -> tuple[str, ...]:
    """Return the command, with this interpreter if it begins with `python` and `env` sets no PATH.
    PATH may have another interpreter first, or none: running `orch` from a virtual environment does not require
    activating it.
    """
    program, *words = config.command
    own = program in _INTERPRETERS and "PATH" not in config.env
    return (sys.executable if own else program, *words)


def interpreter_first(path: str) -> str:
    """Return a PATH on which `python` and programs of its environment belong to this interpreter."""
    own = os.path.dirname(sys.executable)
    found = shutil.which("python", path=path)
    same = found is not None and os.path.dirname(os.path.abspath(found)) == own
    return path if same else os.pathsep.join([own, path])


def working_directory(run: RunDir, config: JobConfig) -> Path:
    """Return the command's working directory: the submit folder if known, else the run directory.

    It may be absent, its file system not mounted. Elsewhere the program would find no checkpoint.
    """
    return Path(config.env.get(FOLDER_VARIABLE) or _from_record(run) or run.path)


def _from_record(run: RunDir) -> str | None:
    try:
        record = json.loads(run.run.read_bytes())
        found = record["identity"]["submit_dir"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return found if isinstance(found, str) else None


def free_port(host: str) -> int:
    """Return a port that is currently free; the script binds it a moment later."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
