"""Termination of a generation's ranks, with or without their fork server."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Collection

from trainer.agent.fork_server.link import ForkServerLink
from trainer.agent.processes.process_tree import kill_children, kill_group
from trainer.agent.rank_processes.local_ranks import LocalRank, LocalRanks

OBEY_SECONDS = 3.0
"""Seconds before a fork server is checked; it normally kills its ranks within milliseconds."""
TERM_SECONDS = 5.0
"""Seconds between SIGTERM and SIGKILL for a user's program."""


async def kill_generation(
    ranks: LocalRanks, link: ForkServerLink, *, politely: bool, term: float = TERM_SECONDS, obey: float = OBEY_SECONDS
) -> None:
    """Kill the ranks; returns once all are gone, or the fork server is lost and `kill_orphaned_ranks` takes over.
    `politely`: send SIGTERM first to a user's program that has not received it; our own ranks ignore it.
    """
    if politely:
        link.signal_ranks(signal.SIGTERM)
        give_up = time.monotonic() + term
        while not ranks.all_gone() and time.monotonic() < give_up:
            await asyncio.sleep(0.02)
    if ranks.all_gone():  # running ranks belong to the next generation
        return
    link.signal_ranks(signal.SIGKILL)
    while True:
        await asyncio.sleep(obey)
        if ranks.all_gone() or link.lost:
            return
        # With memory pinned for a GPU a rank takes long to die, which is not the fork server's fault; it is kept.
        ranks.kill_uncollected()
        reason = _why_not_obeyed(ranks, link)
        if reason:
            link.kill(reason)


def _why_not_obeyed(ranks: LocalRanks, link: ForkServerLink) -> str:
    """Return why this fork server must be killed first; an uncollected dead rank is detected elsewhere."""
    if link.stopped():
        return "it was stopped when its ranks had to be killed"
    if any(local.pid is None and not local.gone for local in ranks.by_rank.values()):
        return "it did not say which processes it had to kill"
    return ""


_LONGEST = 30.0


async def kill_orphaned_ranks(
    ranks: LocalRanks,
    exited: Callable[[int, int | None, int | None], None],
    gone: Callable[[int], None],
    exclude: Collection[int] = (),
) -> None:
    """Kill the process groups of all remaining ranks and the processes that left those groups; reports each exit.
    `exclude`: children of this process other than ranks, the checkpoint writers. A process that cannot be killed (hung
    in the kernel) is given up after half a minute and not reported gone.
    """
    give_up = time.monotonic() + _LONGEST
    left = True
    while (left or not ranks.all_gone()) and time.monotonic() < give_up:
        ranks.kill_directly()
        for local in ranks.by_rank.values():
            if not local.gone:
                _collect(local, exited)
        _collect_other_children(ranks)
        for local in ranks.by_rank.values():
            if not local.gone and (local.pid is None or not kill_group(local.pid, 0)):
                if not local.ended:
                    local.ended = True
                    exited(local.rank, None, None)
                local.gone = True
                gone(local.rank)
        # Without a fork server, every other child of this process is a rank or was started by one.
        left = kill_children(exclude)
        await asyncio.sleep(0.01)


def _collect(local: LocalRank, exited: Callable[[int, int | None, int | None], None]) -> None:
    if local.pid is None or local.ended:
        return
    try:
        pid, status = os.waitpid(local.pid, os.WNOHANG)
    except ChildProcessError:  # the fork server had collected it before it died
        return
    if pid:
        local.ended = True
        code = os.waitstatus_to_exitcode(status)
        exited(local.rank, code if code >= 0 else None, -code if code < 0 else None)


def _collect_other_children(ranks: LocalRanks) -> None:
    """Reap processes started by ranks; `_collect` reaps and reports the ranks themselves."""
    own = {local.pid for local in ranks.by_rank.values() if not local.ended}
    try:
        while (info := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and info.si_pid not in own:
            os.waitpid(info.si_pid, 0)
    except ChildProcessError:
        return
