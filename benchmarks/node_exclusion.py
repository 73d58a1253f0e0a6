"""Faults prevented by avoiding nodes that have failed, and the cost in node-time, on a real fault trace.

    python -m benchmarks.node_exclusion TRACE.json [--nodes 400] [--days 345] [--json]

TRACE is a list of {node_id, event_time (days), event_type: fault_start | fault_end, fault_type: {Class}}, the format of
stepfun-ai/InfiniteHBD-Trace. A fault is prevented if no job would have been on its node. A policy avoids the node for
some days after its repair, which adds to the unusable node-time. All nodes are assumed to be always busy. orch counts
from the repair if Slurm reports the node down or drained; a node that Slurm reports as fit counts as repaired.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.recovery.failure_rate import DAY, HALF_LIFE, NodeHistory, is_worse

NODE_DAYS = 64.0
NO_FAULTS = ("Change", "Test")
"""Classes of deliberate operator actions on a node."""


@dataclass(frozen=True)
class NodeOutage:
    """Period in which a node was unusable, in days."""

    node: str
    start: float
    end: float


Policy = Callable[[NodeHistory, NodeHistory], float]
"""Days to avoid a node after its repair, computed from its history and the other nodes'."""


def faults(events: list[dict[str, Any]]) -> list[NodeOutage]:
    """Return the faults that have an end, sorted by start; a node's faults are assumed to end in the same order."""
    begun: dict[str, list[float]] = {}
    found = []
    for event in sorted(events, key=lambda one: float(one["event_time"])):
        node, at = event["node_id"], float(event["event_time"])
        if event["fault_type"]["Class"] in NO_FAULTS:
            continue
        if event["event_type"] == "fault_start":
            begun.setdefault(node, []).append(at)
        elif begun.get(node):
            found.append(NodeOutage(node, begun[node].pop(0), at))
    return sorted(found, key=lambda one: one.start)


def replay(trace: list[NodeOutage], nodes: int, days: float, policy: Policy) -> tuple[float, float]:
    """Return the share of faults that were prevented, and the share of node-time given up to prevent them."""
    until: dict[str, float] = {}
    starts: dict[str, list[float]] = {}
    prevented, given_up = 0, 0.0
    for known, fault in enumerate(trace, 1):
        mine, now = starts.setdefault(fault.node, []), fault.start
        prevented += now < until.get(fault.node, 0.0)
        mine.append(now)
        decayed = HALF_LIFE / math.log(2) * (1 - 0.5 ** (now * DAY / HALF_LIFE))
        node = NodeHistory(
            failed=tuple((now - at) * DAY for at in reversed(mine)), seconds=now * DAY, recent_seconds=decayed
        )
        others = NodeHistory(failed=(0.0,) * (known - len(mine)), seconds=(nodes - 1) * now * DAY)
        begin = min(days, max(fault.end, until.get(fault.node, 0.0)))
        end = min(days, fault.end + policy(node, others))
        given_up += max(0.0, end - begin)
        until[fault.node] = max(end, until.get(fault.node, 0.0))
    return prevented / len(trace), given_up / (nodes * days)


def second_fault_policy(days: float) -> Policy:
    """Return a policy that avoids a node from its second fault on, however long ago the first was."""
    return lambda node, others: days if len(node.failed) > 1 else 0.0


def ours(days: float) -> Policy:
    """Return orch's policy for faults that are only weak evidence against their node."""
    return lambda node, others: days if len(node.failed) > 1 and is_worse(node, others, NODE_DAYS) else 0.0


def always(days: float) -> Policy:
    """Return orch's policy for faults that each implicate their node."""
    return lambda node, others: days


def rows(trace: list[NodeOutage], nodes: int, days: float) -> list[dict[str, Any]]:
    policies = {f"after every fault, {each:g} d": always(each) for each in (0.25, 1.0, 7.0, 30.0)}
    policies |= {f"after the second fault and later, {each:g} d": second_fault_policy(each) for each in (1.0, 7.0)}
    policies |= {f"where it fails more often than others, {each:g} d": ours(each) for each in (1.0, 7.0)}
    found = []
    for name, policy in policies.items():
        prevented, given_up = replay(trace, nodes, days, policy)
        found.append({"policy": name, "prevented": round(prevented, 4), "given_up": round(given_up, 4)})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, metavar="TRACE.json")
    parser.add_argument("--nodes", type=int, default=400)
    parser.add_argument("--days", type=float, default=345.0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    trace = faults(json.loads(args.trace.read_text()))
    found = rows(trace, args.nodes, args.days)
    if args.json:
        print(json.dumps({"faults": len(trace), "rows": found}))
        return 0
    print(f"{len(trace)} faults of {args.nodes} nodes in {args.days:g} days")
    print(f"{'avoided after a repair':48} {'faults prevented':>16} {'node-time given up':>19}")
    for row in found:
        print(f"{row['policy']:48} {row['prevented']:>16.1%} {row['given_up']:>19.2%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
