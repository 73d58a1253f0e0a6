"""The setup of the nodes in a run's newest attempt: staged archive, caches, binding to cores, NCCL's network."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from orchestrator.cli.runs.nccl_network import NcclNetwork, read_network
from trainer.protocol.events import EventKind, read_events
from trainer.protocol.run_dir import AttemptDir, RunDir


@dataclass(frozen=True, kw_only=True)
class NodeSetupReport:
    """Setup of the first node, which is the same on all nodes but for the cores, and the network of rank 0."""

    prepared: Mapping[str, Any] = field(default_factory=dict)
    bound: Mapping[str, Any] = field(default_factory=dict)
    watched: Mapping[str, Any] = field(default_factory=dict)
    network: NcclNetwork | None = None

    def to_json(self) -> dict[str, Any]:
        network = self.network
        return {
            "staged": self.prepared.get("staged"),
            "variables": self.prepared.get("variables", {}),
            "cores": self.bound.get("cores", {}),
            "binding": self.bound.get("reason", ""),
            "network": None if network is None else asdict(network),
            "watched": dict(self.watched) or None,
        }

    def describe(self) -> dict[str, str]:
        """Return one line per part, keyed by its label."""
        prepared, cores = self.prepared, self.bound.get("cores", {})
        how = "unpacked before" if prepared.get("reused") else f"unpacked in {prepared.get('seconds')} s"
        shown = ", ".join(f"rank {rank}: {text}" for rank, text in list(cores.items())[:8] if text)
        caches = " ".join(f"{name}={value}" for name, value in prepared.get("variables", {}).items())
        return {
            "staged": f"{prepared['staged']}, {how} on {prepared['name']}" if prepared.get("staged") else "",
            "set": caches,
            "cores": f"{shown} ({self.bound['reason']})" if shown else self.bound.get("reason", ""),
            "network": "" if self.network is None else str(self.network),
            "watched": describe_watched(self.watched),
        }


def describe_watched(data: Mapping[str, Any]) -> str:
    """Describe how a command is watched, from its event; "" without one."""
    if not data:
        return ""
    if not data["instrumented"]:
        return f"from outside only: {data['reason']}"
    names = [name for name in data["frameworks"] if name != "plain"]  # the adapter for torch.save, which torch imports
    return f"instrumented: {', '.join(names) or 'torch'}"


def read_node_setup(run: RunDir) -> NodeSetupReport:
    """Read the newest attempt's setup; parts that are absent or unreadable are left out."""
    attempts = run.all_attempts()
    if not attempts:
        return NodeSetupReport()
    newest = attempts[-1]
    found: dict[str, dict[str, Any]] = {}
    with suppress(OSError):
        events, _ = read_events(newest.event_file("agent-0000"))
        found = {event.kind: event.data for event in events if isinstance(event.data, dict)}
    return NodeSetupReport(
        prepared=found.get(EventKind.NODE_PREPARED, {}), bound=found.get(EventKind.RANKS_BOUND, {}),
        watched=found.get(EventKind.PROGRAM_WATCHED, {}),
        network=read_network(newest.rank_log(0)),
    )  # fmt: skip


def read_node_variables(attempt: AttemptDir, name: str) -> dict[str, str]:
    """Return the variables that a node's preparation has set for its ranks; none while it has not ended.

    An agent's number is not its node's position, so every agent's events are read.
    """
    for path in sorted(attempt.events.glob("agent-*.jsonl")):
        with suppress(OSError):
            events, _ = read_events(path)
            found = next((event.data for event in events if event.kind == EventKind.NODE_PREPARED), {})
            if found.get("name") == name and isinstance(variables := found.get("variables"), dict):
                return {str(key): str(value) for key, value in variables.items()}
    return {}
