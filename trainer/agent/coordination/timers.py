"""What the coordinator does once a second: pings, whatever the file system does, and files, as fast as it answers."""

import asyncio
import time

from trainer.agent.attempt_state.attempt_state import AttemptState
from trainer.agent.attempt_state.outbox import Reading
from trainer.agent.control.own_messages import Fenced, RequestFound, Tick
from trainer.agent.coordination.job_monitor import JobMonitor
from trainer.agent.coordination.launch_gate import Fence
from trainer.agent.coordination.request_inbox import RequestInbox
from trainer.agent.watch.report_schedule import calm_seconds
from trainer.contract.heartbeat import Stage
from trainer.contract.messages.agents import Ping

SECONDS = 1.0


class Timers:
    """Two tasks: the one that touches files may hang for minutes, the other one goes on."""

    def __init__(self, state: AttemptState, monitor: JobMonitor) -> None:
        self._state, self._monitor = state, monitor
        self._fence = Fence(state.attempt_dir.go, state.token)
        self._request_inbox = RequestInbox(state.run_dir.requests, state.attempt_dir.number)
        self._tasks: list[asyncio.Task[None]] = []
        # Seconds between two pings, and two readings of all ranks: as agents of so many nodes report.
        self._pause, self._ranks_due = calm_seconds(state.config.cluster.all_nodes), 0.0

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._ping_agents()), loop.create_task(self._touch_files())]

    def check(self) -> None:
        """Raise what ended either task: the coordinator must not go on without it."""
        for task in self._tasks:
            if task.done():
                task.result()

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def write_status(self) -> None:
        """Write heartbeat.json, and ranks.json while ranks run."""
        # First, so that a hung file system cannot delay it: failures and the outcome contain the step.
        self._state.merge_reports()
        await self._state.outbox.show(self._read_status)

    def _read_status(self) -> Reading:
        beat, now = self._state.heartbeat(), time.monotonic()
        if self._state.stage is not Stage.RUNNING or now < self._ranks_due:
            return beat, None
        self._ranks_due = now + self._pause - SECONDS / 2
        return beat, self._monitor.rank_readings(time.time())

    async def _ping_agents(self) -> None:
        due = 0.0
        while True:
            now = time.monotonic()
            self._state.roster.tick(now)
            if now >= due:
                due = now + self._pause - SECONDS / 2
                self._state.roster.broadcast(Ping())
            self._state.deliver(-1, Tick())
            await asyncio.sleep(SECONDS)

    async def _touch_files(self) -> None:
        while True:
            await self.write_status()
            for request in await self._request_inbox.poll():
                self._state.deliver(-1, RequestFound(request=request))
            if await self._state.outbox.look(self._fence.is_down):
                self._state.deliver(-1, Fenced())
            await asyncio.sleep(SECONDS)
