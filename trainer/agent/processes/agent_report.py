"""The report of an agent that ends without its coordinator: the controller can learn of it from files only."""

import time
from contextlib import suppress

from trainer.agent.processes.detached_thread import run_detached
from trainer.contract.failures.outcome import AgentEnd, AgentReport
from trainer.contract.node_identity import NodeIdentity
from trainer.contract.run_dir import AttemptDir

_SECONDS = 5.0
"""How long it may take: a file system that hangs may be why the coordinator is lost."""


async def write(attempt: AttemptDir, identity: NodeIdentity, end: AgentEnd, why: str) -> None:
    """Write it, as far as the file system answers."""
    reason = f"{identity.name}{'' if end is AgentEnd.REFUSED else ' lost the coordinator'}: {why}"
    report = AgentReport(node=identity.node, name=identity.name, end=end, reason=reason, time=time.time())
    with suppress(OSError):
        await run_detached(lambda: report.write(attempt.agent_report(identity.node)), _SECONDS)
