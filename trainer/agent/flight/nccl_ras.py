"""Client of NCCL's RAS subsystem (NCCL 2.28.7 or newer), an independent view of a job's communicators.

Each process of the job with NCCL listens on one address per node, and the kernel chooses which of them answers. The
counts are of launched collectives: a rank that has launched as many as its peers may still not have completed them.
"""

import json
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_ADDRESS = "localhost:28028"
_CLIENT_PROTOCOL = 2
_MOST = 64 << 20
"""Maximum bytes of an answer."""
_TRIES = 3
"""Number of connections to try, since a stopped process may be the one that accepts."""


@dataclass(frozen=True, kw_only=True)
class RasRank:
    """One process in the communicator in which it is furthest behind its peers."""

    pid: int
    launched: int = 0  # collectives
    most: int = 0  # collectives that a peer in the same communicator has launched
    missing: bool = False  # it did not answer, or counts as dead


def query_ras(seconds: float, environ: Mapping[str, str] = os.environ) -> dict[int, RasRank]:
    """Return the processes that NCCL knows by PID, or an empty mapping if it does not answer in time."""
    host, _, port = environ.get("NCCL_RAS_ADDR", _ADDRESS).rpartition(":")
    for _ in range(_TRIES):
        try:
            return parse_status(_ask((host.strip("[]"), int(port)), seconds / _TRIES))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):  # absent, late, or an older version
            continue
    return {}


def _ask(address: tuple[str, int], seconds: float) -> bytes:
    with socket.create_connection(address, timeout=seconds) as link, link.makefile("rwb") as stream:
        for line in (f"CLIENT PROTOCOL {_CLIENT_PROTOCOL}", f"TIMEOUT {seconds / 2:g}", "SET FORMAT json"):
            stream.write(f"{line}\n".encode())
            stream.flush()
            answer = stream.readline(1024)
            if not answer.startswith((b"SERVER PROTOCOL", b"OK")):
                raise ValueError(f"NCCL answered {answer!r} to {line}")
        stream.write(b"VERBOSE STATUS\n")
        stream.flush()
        return stream.read(_MOST)


def parse_status(text: bytes) -> dict[int, RasRank]:
    """Return the processes in a status by PID. Raises ValueError, KeyError, TypeError or AttributeError."""
    found: dict[int, RasRank] = {}
    for communicator in json.loads(text)["communicators"]:
        for one in _ranks(communicator):
            known = found.get(one.pid)
            if known is None or (one.missing, one.most - one.launched) > (known.missing, known.most - known.launched):
                found[one.pid] = one
    return found


def _ranks(communicator: Mapping[str, Any]) -> Iterator[RasRank]:
    counts = {rank["pid"]: sum(rank["collective_counts"].values()) for rank in communicator["ranks"]}
    most = max(counts.values(), default=0)
    for pid, launched in counts.items():
        yield RasRank(pid=pid, launched=launched, most=most)
    for rank in communicator["missing_ranks"]:
        yield RasRank(pid=rank["pid"], most=most, missing=any(rank["status"].values()))
