"""What `orch doctor --locks` has proved, in a file beside the registry: between which hosts, on which file system."""

import json
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from checkpointing.storage.durable import dump_line, write_durably
from orchestrator.registry.locks.filesystem import Mount
from orchestrator.registry.locks.lock_peer import LockPeer
from orchestrator.registry.locks.lock_probe import PeerCall, lock_fault, other_peer, probe_file


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Locks were seen to work between two hosts. It says nothing of a third one: clients are configured one by one."""

    kind: str
    source: str
    hosts: tuple[str, ...]
    proved_at: float


def proof_file(registry: Path) -> Path:
    """One for the folder, since a rebuilt registry is made under another name first."""
    return registry.with_name("registry-locks.json")


def proofs(registry: Path) -> list[Proof]:
    """All of them; none when there is no file, or it cannot be read."""
    try:
        rows = json.loads(proof_file(registry).read_bytes())
        return [Proof(**{**row, "hosts": tuple(row["hosts"])}) for row in rows]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def is_proved(registry: Path, mount: Mount, host: str | None = None) -> bool:
    """Whether locks were seen to work between `host` (this one) and another, on this very file system."""
    host = host or socket.gethostname()
    return any(
        (each.kind, each.source) == (mount.kind, mount.source) and host in each.hosts for each in proofs(registry)
    )


def prove_with(launcher: tuple[str, ...], registry: Path, mount: Mount, now: float) -> Proof | str:
    """As `prove`, with the host on which `launcher` starts a program; raises OSError and ProbeFailed."""
    with probe_file(registry) as path, other_peer(launcher, path) as there:
        here = LockPeer(str(path))
        try:
            return prove(registry, mount, here.do, there, now)
        finally:
            here.close()


def prove(registry: Path, mount: Mount, here: PeerCall, there: PeerCall, now: float) -> Proof | str:
    """Try the locks between two hosts; the proof, or what is wrong. Raises OSError and ProbeFailed.

    A proof is kept beside the registry; a fault takes back what was proved of these two before.
    """
    (host, boot), (other, other_boot) = _introduced(here("who")), _introduced(there("who"))
    if boot == other_boot:
        return f"{other} is this same machine: only another one proves anything"
    fault = lock_fault(here, there)
    proof = Proof(kind=mount.kind, source=mount.source, hosts=(host, other), proved_at=now)
    kept = [each for each in proofs(registry) if set(each.hosts) != {host, other}]
    _write(registry, kept if fault else [*kept, proof])
    return f"{fault} ({host} and {other})" if fault else proof


def _introduced(answer: str) -> tuple[str, str]:
    host, _, boot = answer.partition(" ")
    return host, boot


def _write(registry: Path, kept: list[Proof]) -> None:
    write_durably(proof_file(registry), dump_line([asdict(each) for each in kept]).encode())
