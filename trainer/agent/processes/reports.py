"""The report of an agent that ends without its coordinator's word: the controller can hear of it by files alone."""

import time
from contextlib import suppress

from trainer.agent.processes.apart import apart
from trainer.contract.outcome import AgentEnd, AgentReport
from trainer.contract.place import Place
from trainer.contract.run_dir import AttemptDir

_SECONDS = 5.0
"""How long it may take: a file system that hangs may be why the coordinator is lost."""


async def leave(attempt: AttemptDir, place: Place, end: AgentEnd, why: str) -> None:
    """Write it, as far as the file system answers."""
    reason = f"{place.name} lost the coordinator: {why}"
    report = AgentReport(node=place.node, name=place.name, end=end, reason=reason, time=time.time())
    with suppress(OSError):
        await apart(lambda: report.write(attempt.agent_report(place.node)), _SECONDS)
