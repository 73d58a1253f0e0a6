"""The flight recorder for a rank's collectives, its server, and stack dumps on a signal."""

import faulthandler
import json
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json, _WorkerServer  # type: ignore[attr-defined]

from checkpointing.storage.durable import write_atomically
from trainer.protocol.failures.failure_patterns import Meaning, has_meaning
from trainer.protocol.flight_variables import FLIGHT_DEFAULTS, FLIGHT_FILE
from trainer.protocol.logs.line_file import LineFile
from trainer.protocol.messages.ranks import STACKS, RankSpec, encode_runs, groups_file
from trainer.protocol.run_dir import RunDir
from trainer.worker.reporting.stderr_best_effort import write_stderr
from trainer.worker.startup.rendezvous import PeerLost

_MAX_ENTRIES = 500
"""Maximum number of entries kept from a failed rank's record (about 200 KiB)."""


@contextmanager
def recording(spec: RankSpec) -> Iterator[None]:
    """Record collectives. Enter this before torch creates the first process group and reads the environment."""
    for name, value in FLIGHT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    # NCCL's watchdog writes its output next to ours, not into a folder that is deleted when the job ends.
    near = RunDir(Path(spec.run_dir)).attempt(spec.attempt).watchdog_flight(spec.generation)
    os.environ.setdefault(FLIGHT_FILE, str(near))
    if spec.stacks_fd >= 0:
        faulthandler.register(STACKS, file=spec.stacks_fd, all_threads=True, chain=False)
    server = _serve(spec.flight) if spec.flight else None
    try:
        yield
    finally:
        if server is not None:
            with _stderr_silenced():
                server.shutdown()
        if spec.stacks_fd >= 0:
            faulthandler.unregister(STACKS)
            # The signal may still be pending. Without a handler, it would kill the rank.
            signal.signal(STACKS, signal.SIG_IGN)


def write_groups(spec: RankSpec) -> None:
    """Write the ranks of each process group, which gloo's records lack. Call this once the groups exist."""
    if not spec.flight or not dist.is_initialized():
        return
    try:
        write_atomically(Path(groups_file(spec.flight)), json.dumps(_groups()).encode())
    except OSError as error:
        write_stderr(f"orch: this rank's process groups could not be written, hang reports will be less exact: {error}")


def is_secondary_failure(error: BaseException) -> bool:
    """Return whether `error` only reports a dead peer. If so, the cause is elsewhere."""
    if isinstance(error, PeerLost):
        return True
    # Only errors from torch's collectives count. A ConnectionResetError in the user's code is a cause.
    if not isinstance(error, dist.DistError) and type(error) is not RuntimeError:
        return False
    return has_meaning(str(error), Meaning.PEER_GONE)


def dump(spec: RankSpec, error: BaseException) -> None:
    """Save the flight record of a rank that failed with `error`. Never raises."""
    path = RunDir(Path(spec.run_dir)).attempt(spec.attempt).last_flights(spec.node_name, spec.generation)
    try:
        if not dist.is_initialized():
            return
        # The record shows a failed collective as finished, so `failed` marks that the newest one did not finish.
        record = {
            **_newest(_dump_fr_trace_json()),
            "rank": spec.rank,
            "failed": is_secondary_failure(error),
            "groups": _groups(),
        }
        if dump_nccl := getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None):  # only in GPU builds
            record["device"] = _newest(dump_nccl())
        file = LineFile(path)
        try:
            file.append(json.dumps(record))
        finally:
            file.close()
    except (OSError, RuntimeError, ValueError, TypeError) as trouble:
        write_stderr(f"orch: this rank's flight record is lost: {trouble}")


def _newest(dump: str | bytes) -> dict[str, Any]:
    record = json.loads(dump)
    return {**record, "entries": record.get("entries", [])[-_MAX_ENTRIES:]}


def _groups() -> Mapping[str, Any]:
    known = dist.distributed_c10d._world.pg_names
    return {
        name: {"name": name, "desc": group.group_desc, "runs": encode_runs(dist.get_process_group_ranks(group))}
        for group, name in known.items()
    }


def _serve(path: str) -> _WorkerServer | None:
    """Start torch's C++ server, which answers even while the training thread hangs or the GIL is held."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    try:
        with _stderr_silenced():
            return _WorkerServer(path, -1)
    except (RuntimeError, OSError) as error:
        write_stderr(f"orch: no flight server on {path}, hang reports will lack flight records: {error}")
        return None


@contextmanager
def _stderr_silenced() -> Iterator[None]:
    """Suppress C++ output to stderr, such as warnings about the normal start and stop of the server."""
    kept, devnull = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(devnull, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(devnull)
