"""The launch token of an attempt. An agent waits for it before training; the coordinator rechecks it."""

import asyncio
import time
from contextlib import suppress
from pathlib import Path

from trainer.agent.processes.background_tasks import HungFileSystem, RepeatedRead
from trainer.protocol.config_sections.scheduler_kinds import traits
from trainer.protocol.launch_token import LaunchToken, was_revoked
from trainer.protocol.node_identity import NodeIdentity
from trainer.protocol.run_dir import RunDir

REQUEUED_GO_SECONDS = 600.0
"""Time that an agent of a requeued job waits for the next attempt's GO, because the controller may be starting."""


class LaunchRefused(Exception):
    """Raised if this process must not train; the message gives the reason."""


async def wait_for_go(path: Path, identity: NodeIdentity, attempt: int, *, seconds: float | None = None) -> LaunchToken:
    """Wait for the attempt's launch token and return it.
    Raises LaunchRefused if it belongs to another job or does not arrive in time, and HungFileSystem if its file system
    does not respond.
    """
    # Slurm restarted this job; it has already trained under the same token.
    if identity.restarts > 0:
        raise LaunchRefused(
            f"Slurm has restarted job {identity.job_id} ({identity.restarts} times); orch starts new jobs instead"
        )
    patience = seconds if seconds is not None else traits(identity.kind).go_seconds
    token = await _read_late(RepeatedRead(lambda: LaunchToken.read(path), path), path, patience)
    if token.attempt != attempt:
        raise LaunchRefused(f"{path} is for attempt {token.attempt}, this is attempt {attempt}")
    if token.job_id != identity.job_id:
        raise LaunchRefused(f"{path} is for job {token.job_id}, this is job {identity.job_id}")
    return token


async def wait_for_next_go(
    run: RunDir, identity: NodeIdentity, attempt: int, *, seconds: float = REQUEUED_GO_SECONDS
) -> LaunchToken:
    """Wait for the token of the later attempt that continues in this requeued job. Raises as `wait_for_go` does."""

    def read() -> LaunchToken:
        for place in (place for place in reversed(run.all_attempts()) if place.number > attempt):
            with suppress(FileNotFoundError):
                token = LaunchToken.read(place.go)
                if (token.job_id, token.restarts) == (identity.job_id, identity.restarts):
                    return token
        raise FileNotFoundError

    path = run.attempts / "*" / "GO"
    return await _read_late(RepeatedRead(read, path), path, seconds)


async def _read_late(token: RepeatedRead[LaunchToken], path: Path, patience: float) -> LaunchToken:
    pause = 0.02
    give_up = time.monotonic() + patience
    while True:
        try:
            return await token.result(give_up - time.monotonic())
        except FileNotFoundError:
            problem = "does not exist"
        except HungFileSystem as error:
            raise HungFileSystem(path, patience) from error
        except (OSError, ValueError, TypeError, KeyError) as error:
            problem = f"cannot be read: {error}"
        if time.monotonic() + pause >= give_up:
            raise LaunchRefused(f"{path} {problem} after {patience:.0f} s")
        await asyncio.sleep(pause)
        pause = min(pause * 1.5, 0.25)


class Fence:
    """Repeated check of the launch token: if it is missing or belongs to another job, this attempt must end."""

    def __init__(self, path: Path, token: LaunchToken) -> None:
        self._path, self._token, self._misses = path, token, 0
        self.reason = ""  # why the attempt is fenced

    def is_down(self) -> bool:
        """Return whether two consecutive reads found no matching token. An unresponsive file system proves nothing."""
        try:
            held = self._token.is_same(LaunchToken.read(self._path))
        except FileNotFoundError:
            held = False
            revoked = "its launch token was revoked: the controller has fenced this attempt off"
            deleted = f"its launch token {self._path} is missing: it was deleted, but not by orch, so no save is safe"
            self.reason = revoked if was_revoked(self._path) else deleted
        except (OSError, ValueError, TypeError, KeyError):
            return False
        else:
            self.reason = f"its launch token {self._path} belongs to another job"
        self._misses = 0 if held else self._misses + 1
        return self._misses >= 2
