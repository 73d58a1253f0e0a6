"""The end of a generation's ranks by order: by their fork server, then by their agent, at last without it."""

import asyncio
import signal
import time

from trainer.agent.fork_server.link import ForkServerLink
from trainer.agent.ranks.local_ranks import LocalRanks

OBEY_SECONDS = 3.0
"""A fork server kills its ranks within milliseconds; one that has not after so long is checked."""
TERM_SECONDS = 5.0
"""How long a user's program has between SIGTERM and SIGKILL."""


async def kill_all(
    ranks: LocalRanks, link: ForkServerLink, *, politely: bool, term: float = TERM_SECONDS, obey: float = OBEY_SECONDS
) -> None:
    """Until all are gone, or the fork server is lost: then `kill_orphaned_ranks` takes over.

    `politely`: send SIGTERM first, to a user's program that has not had it yet; our own ranks ignore it.
    """
    if politely:
        link.signal_ranks(signal.SIGTERM)
        give_up = time.monotonic() + term
        while not ranks.all_gone() and time.monotonic() < give_up:
            await asyncio.sleep(0.02)
    if ranks.all_gone():  # ranks that run now are of the next generation
        return
    link.signal_ranks(signal.SIGKILL)
    while True:
        await asyncio.sleep(obey)
        if ranks.all_gone() or link.lost:
            return
        # With memory pinned for a GPU a rank takes long to die: that is not the fault of its fork server, which stays.
        ranks.kill_uncollected()
        reason = _why_not_obeyed(ranks, link)
        if reason:
            link.kill(reason)


def _why_not_obeyed(ranks: LocalRanks, link: ForkServerLink) -> str:
    """Why this fork server must be killed first; one that leaves a dead rank uncollected is found elsewhere."""
    if link.stopped():
        return "it was stopped when its ranks had to be killed"
    if any(local.pid is None and not local.gone for local in ranks.by_rank.values()):
        return "it did not say which processes it had to kill"
    return ""
