"""Fault injection into a live job: the orders of drill requests, and their execution by an agent."""

import os
import signal

from trainer.agent.processes.process_tree import kill_group
from trainer.agent.rank_processes.local_ranks import LocalRanks
from trainer.protocol.config_sections.fault_detection_config import KINDS
from trainer.protocol.config_sections.recipe_config import ClusterShape
from trainer.protocol.messages.agents import InjectFault
from trainer.protocol.requests import REFUSED, Request

AGENT_KINDS = {
    "kill-agent": "SIGKILL to the agent of a node",
    "kill-node": "SIGKILL to the agent of a node and to everything that it has started",
}
"""Faults that an agent injects into its own node; the rank concerned injects those in `KINDS`."""

_BY_SIGNAL = {"kill-rank": signal.SIGKILL, "stop-rank": signal.SIGSTOP}
"""Kinds that the agent carries out at once, without waiting for a step."""


def drill_order(request: Request, cluster: ClusterShape) -> tuple[InjectFault | None, str]:
    """Return the order for a drill request, or None if it is refused, and the answer."""
    kind, at = request.detail, 0 if request.value is None else int(request.value)
    node = kind in AGENT_KINDS
    if not node and kind not in KINDS:
        return None, f"{REFUSED}no such drill: {kind}; there are {', '.join([*KINDS, *AGENT_KINDS])}"
    what, most = ("node", cluster.nodes) if node else ("rank", cluster.world_size)
    if not 0 <= at < most:
        return None, f"{REFUSED}there is no {what} {at}, only 0 to {most - 1}"
    return InjectFault(kind=kind, at=at, value=_VALUES.get(kind, 0.0)), f"{kind} strikes {what} {at}"


_VALUES = {"slow-rank": 0.3}
"""Seconds of extra work per step of a slow rank."""


def is_here(order: InjectFault, ranks: LocalRanks, node_rank: int | None) -> bool:
    """Return whether the order concerns this node."""
    return order.at == node_rank if order.kind in AGENT_KINDS else order.at in ranks.by_rank


def inject(order: InjectFault, ranks: LocalRanks) -> None:
    """Inject the fault; does not return if it kills the agent."""
    kind = order.kind
    if kind == "kill-node":
        for local in ranks.by_rank.values():
            if local.pid is not None:
                kill_group(local.pid)
    if kind in AGENT_KINDS:
        os.kill(os.getpid(), signal.SIGKILL)  # its processes die with it
    local = ranks.by_rank[order.at]
    if kind not in _BY_SIGNAL:
        local.cell.order_drill(list(KINDS).index(kind), order.serial, order.value)
    elif local.pid is not None and not local.ended:
        os.kill(local.pid, _BY_SIGNAL[kind])
