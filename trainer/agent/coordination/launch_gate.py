"""The gate before training: only the one job that the controller has adopted for this attempt may pass."""

import asyncio
import time
from pathlib import Path

from trainer.agent.processes.detached_thread import HungFileSystem, RepeatedRead
from trainer.contract.config_sections.scheduler_kinds import traits
from trainer.contract.launch_token import LaunchToken
from trainer.contract.node_identity import NodeIdentity


class Refused(Exception):
    """This process must not train; the message says why."""


async def wait_for_go(path: Path, identity: NodeIdentity, attempt: int, *, seconds: float | None = None) -> LaunchToken:
    """The attempt's launch token once it is there; raises Refused when it is not for this job, or does not come.

    Raises HungFileSystem while its file system does not answer.
    """
    # Slurm restarted this job: it has trained before under the same token.
    if identity.restarts > 0:
        raise Refused(
            f"Slurm has restarted job {identity.job_id} ({identity.restarts} times); orch starts new jobs instead"
        )
    patience = seconds if seconds is not None else traits(identity.kind).go_seconds
    token = await _read_late(path, patience)
    if token.attempt != attempt:
        raise Refused(f"{path} is for attempt {token.attempt}, this is attempt {attempt}")
    if token.job_id != identity.job_id:
        raise Refused(f"{path} is for job {token.job_id}, this is job {identity.job_id}")
    return token


async def _read_late(path: Path, patience: float) -> LaunchToken:
    token, pause = RepeatedRead(lambda: LaunchToken.read(path), path), 0.02
    give_up = time.monotonic() + patience
    while True:
        try:
            return await token.result(give_up - time.monotonic())
        except FileNotFoundError:
            problem = "is not there"
        except HungFileSystem as error:
            raise HungFileSystem(path, patience) from error
        except (OSError, ValueError, TypeError, KeyError) as error:
            problem = f"cannot be read: {error}"
        if time.monotonic() + pause >= give_up:
            raise Refused(f"{path} {problem} after {patience:.0f} s")
        await asyncio.sleep(pause)
        pause = min(pause * 1.5, 0.25)


class Fence:
    """Reads GO again and again: a token that is gone, or of another job, means that this attempt must end."""

    def __init__(self, path: Path, token: LaunchToken) -> None:
        self._path, self._token, self._misses = path, token, 0

    def is_down(self) -> bool:
        """Whether two reads in a row found no token of ours; a file system that does not answer proves nothing."""
        try:
            held = self._token.is_same(LaunchToken.read(self._path))
        except FileNotFoundError:
            held = False
        except (OSError, ValueError, TypeError, KeyError):
            return False
        self._misses = 0 if held else self._misses + 1
        return self._misses >= 2
