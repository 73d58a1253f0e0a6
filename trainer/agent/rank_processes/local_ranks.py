"""The ranks of one generation on one node: cells, control sockets, PIDs and exits."""

import asyncio
import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from trainer.agent.flight.recorder import FlightSockets
from trainer.agent.fork_server.instrumentation import RankFiles
from trainer.agent.fork_server.link import ForkServerLink
from trainer.agent.processes.background_tasks import start_detached
from trainer.agent.processes.proc import OomKills, find_descendant, is_descendant, kill_children, kill_group
from trainer.protocol.config_sections.fault_detection_config import KINDS
from trainer.protocol.config_sections.recipe_config import ClusterShape
from trainer.protocol.failures.rank_end import RankEnd
from trainer.protocol.messages.agents import InjectFault, LossRow, ProgressReport
from trainer.protocol.messages.codec import MessageError
from trainer.protocol.messages.ranks import (
    FROM_RANK,
    FromRank,
    RendezvousStore,
    packet_pair,
    receive_message,
    send_message,
)
from trainer.protocol.node_identity import process_state
from trainer.protocol.rank_progress.program_record import ProgramFlags, is_instrumented
from trainer.protocol.rank_progress.progress import Progress, ProgressCell, StopReason
from trainer.protocol.requests import REFUSED, Request
from trainer.protocol.run_dir import AttemptDir


@dataclass(kw_only=True)
class LocalRank:
    """A local rank as seen by its agent."""

    rank: int
    cell: ProgressCell
    control: socket.socket
    theirs: socket.socket | None
    stacks: int  # memfd that receives its stacks
    log_rank: int  # rank whose log receives its output
    pid: int | None = None  # the process that orch has started for it
    handle: int | None = None  # pidfd
    program: int | None = None  # process of a launcher that trains as this rank
    program_handle: int | None = None  # pidfd
    reporter: tuple[int, int | None] = (0, None)  # PID in the cell, and this process as the agent sees it
    left: float = 0.0  # time at which `program` was found dead; 0: it lives
    ended: bool = False
    gone: bool = False
    reported: bool = False  # its exit was reported to the coordinator
    last: Progress = field(default_factory=Progress)
    reported_end: RankEnd | None = None  # the rank's own report of its end, over its control socket

    def descriptors(self) -> list[int]:
        assert self.theirs is not None
        return [self.cell.descriptor, self.theirs.fileno(), self.stacks]

    def close_theirs(self) -> None:
        """Close the rank's end of the control socket, which the rank now holds."""
        if self.theirs is not None:
            self.theirs.close()
            self.theirs = None

    def receive_message(self) -> FromRank | MessageError | None:
        """Return the rank's next message, if any; an exit report is also kept."""
        try:
            message = receive_message(self.control, FROM_RANK)
        except OSError:
            return None
        except MessageError as error:  # truncated or forged
            return error
        if isinstance(message, RankEnd):
            self.reported_end = message
        return message

    def find_reporter(self) -> int | None:
        """Return the process that writes the cell, if the rank's own process is it or has started it.

        The process may be in a PID namespace of its own, such as a container's, and then reports another number.
        """
        record = self.cell.program()
        if record is None or self.pid is None:
            return None
        if record.pid != self.reporter[0]:
            self.reporter = record.pid, find_descendant(record.pid, self.pid)
        return self.reporter[1]

    def follow(self, pid: int) -> None:
        """Watch a process that a launcher has started as this rank, unless it is not a child of the launcher."""
        try:
            handle = os.pidfd_open(pid)
        except OSError:  # it has ended
            return
        if self.pid is None or not is_descendant(pid, self.pid):
            os.close(handle)
            return
        if self.program_handle is not None:
            os.close(self.program_handle)
        self.program, self.program_handle, self.left = pid, handle, 0.0

    def read_progress(self) -> Progress:
        """Return the newest consistent reading. A torn one, left by a rank that died while writing, is ignored."""
        reading = self.cell.read()
        if reading is not None:
            self.last = reading
        return self.last

    def knows_loss(self) -> bool:
        """Return whether the loss in the cell is the rank's. A user's program may not report one."""
        program = self.cell.program()
        return self.has_stepped() and (program is None or ProgramFlags.KNOWS_LOSS in program.flags)

    def loss_row(self) -> LossRow | None:
        """Return the losses of a user's program, or None if it reports none."""
        one = self.cell.program()
        if one is None or not is_instrumented(one.flags) or not self.knows_loss():
            return None
        return (self.rank, one.unusable_losses, one.unusable_since, one.finite_until)

    def has_stepped(self) -> bool:
        return self.last.step > self.last.restored_step

    def answers_requests(self) -> bool:
        """Return whether a user's program reads stop requests from its cell, and saves and exits by itself."""
        program = self.cell.program()
        return program is not None and is_instrumented(program.flags) and bool(program.flags & ProgramFlags.ANSWERS)


_TOGETHER = 0.05
"""Processes found dead within this many seconds may have ended in any order."""


def _is_dead(handle: int) -> bool:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(0))


class LocalRanks:
    """All ranks of one generation on this node."""

    def __init__(self, generation: int, ranks: range, *, per_node: bool = False) -> None:
        """If `per_node`, one process, the first rank's, starts all ranks."""
        self.generation, self.per_node = generation, per_node
        self.killed, self.started = False, time.monotonic()
        self.oom_kills = OomKills()
        self.by_rank: dict[int, LocalRank] = {}
        for rank in ranks:
            ours, theirs = packet_pair()
            ours.setblocking(False)
            cell = ProgressCell.create(f"orch-progress-{rank}")
            stacks = os.memfd_create(f"orch-stacks-{rank}", os.MFD_CLOEXEC)
            self.by_rank[rank] = LocalRank(
                rank=rank, cell=cell, control=ours, theirs=theirs, stacks=stacks,
                log_rank=ranks[0] if per_node else rank,
            )  # fmt: skip

    def files(self, sockets: FlightSockets) -> RankFiles:
        """Return the files that the start-up modules of these ranks open."""
        everybody = self.by_rank.values()
        return RankFiles(
            cells=tuple(local.cell.descriptor for local in everybody),
            stacks=tuple(local.stacks for local in everybody),
            sockets=tuple(sockets.path(local.rank, self.generation) for local in everybody),
        )

    def ranks_of_process(self, rank: int) -> list[LocalRank]:
        """Return the ranks of the process that was started for this rank."""
        return list(self.by_rank.values()) if self.per_node else [self.by_rank[rank]]

    def find_programs(self) -> bool:
        """Find the processes that a launcher has started as ranks. Return whether the first one of them has ended."""
        before = any(local.left for local in self.by_rank.values())
        for local in self.by_rank.values():
            if not self.per_node or local.ended:  # the end of a launcher ends its ranks, in any order
                continue
            if (pid := local.find_reporter()) is not None and pid not in (local.pid, local.program):
                local.follow(pid)
            if local.program_handle is not None and not local.left and _is_dead(local.program_handle):
                local.left = time.monotonic()
        return not before and any(local.left for local in self.by_rank.values())

    def awaits_program(self, order: InjectFault) -> bool:
        """Return whether a fault is for a rank that its launcher has not started yet."""
        if not self.per_node or order.kind in AGENT_KINDS:
            return False
        local = self.by_rank[order.at]
        return local.program is None and not local.ended

    def first_dead(self) -> int | None:
        """Return the rank whose process was found dead first while its launcher lived, or None if that is unclear."""
        dead = sorted((local.left, local.rank) for local in self.by_rank.values() if local.left)
        is_clear = len(dead) == 1 or (len(dead) > 1 and dead[1][0] - dead[0][0] > _TOGETHER)
        return dead[0][1] if is_clear else None

    def memory_kill(self, rank: int, number: int | None) -> str:
        """Describe how the kernel killed this rank for lack of memory. Return "" if it did not."""
        local = self.by_rank[rank]
        return self.oom_kills.words(local.program or local.pid) if number == signal.SIGKILL else ""

    def ask(self, reason: StopReason, deadline: float) -> None:
        """Write a request into every cell; `deadline` is on this node's monotonic clock."""
        for local in self.by_rank.values():
            local.cell.ask_stop(reason, deadline)

    def expect_stop(self, at: float) -> None:
        """Announce to every rank when it will be asked to stop, on this node's monotonic clock."""
        for local in self.by_rank.values():
            local.cell.expect_stop(at)

    def forward_store(self, store: RendezvousStore) -> None:
        """Send the address of the store that rank 0 created to every other rank."""
        for local in self.by_rank.values():
            if local.rank != 0 and not local.ended:
                with contextlib.suppress(OSError):  # it has died; its exit report is on its way
                    send_message(local.control, store)

    def answer_requests(self) -> bool:
        """Return whether all ranks are a user's program that saves and exits when its cell requests it."""
        return all(local.answers_requests() for local in self.by_rank.values())

    def all_gone(self) -> bool:
        return all(local.gone for local in self.by_rank.values())

    def all_stopped(self) -> bool:
        """Return whether a signal has stopped all remaining ranks, so that none can act on SIGTERM."""
        remaining = [local.program or local.pid for local in self.by_rank.values() if not (local.gone or local.left)]
        return all(pid is not None and process_state(pid) == "T" for pid in remaining)

    def all_reported(self) -> bool:
        """Return whether all ranks are gone and their exits have been reported to the coordinator."""
        return all(local.gone and local.reported for local in self.by_rank.values())

    def mark_never_started(self) -> None:
        """Mark all ranks as ended; no process was started for any of them."""
        for local in self.by_rank.values():
            local.ended = local.gone = local.reported = True

    def summary(self) -> ProgressReport:
        """Summarize the ranks: the slowest rank's step and phase, the first rank's loss, and the highest of other
        values.
        """
        readings = [(local, local.read_progress()) for local in self.by_rank.values()]
        slowest = min((reading for _, reading in readings), key=lambda reading: reading.step)
        first_rank, first = readings[0]
        return ProgressReport(
            generation=self.generation,
            step=slowest.step,
            phase=slowest.phase.name.lower(),
            loss=first.loss if first_rank.knows_loss() else None,
            saved=max(reading.saved_step for _, reading in readings),
            total=max(reading.total_steps for _, reading in readings),
            restored=max(reading.restored_step for _, reading in readings),
            save_seconds=max(reading.save_seconds for _, reading in readings),
            step_seconds=max(reading.step_seconds for _, reading in readings),
            stepped=all(local.has_stepped() for local in self.by_rank.values()),
            answers=self.answer_requests(),
            losses=tuple(row for local, _ in readings if (row := local.loss_row()) is not None),
        )

    def kill_directly(self) -> None:
        """Kill ranks whose fork server is gone. This process has adopted them; each has its own process group."""
        for local in self.by_rank.values():
            if local.pid is not None and not local.gone:
                kill_group(local.pid, signal.SIGKILL)

    def kill_uncollected(self) -> None:
        """Kill ranks while the fork server may still reap them; until it does, a group's number is not reused."""
        for local in self.by_rank.values():
            if local.pid is None or local.handle is None or local.ended:
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):  # reaped, or another user's by now
                signal.pidfd_send_signal(local.handle, signal.SIGKILL)
                kill_group(local.pid)

    def close(self) -> None:
        self.oom_kills.close()
        for local in self.by_rank.values():
            local.control.close()
            local.close_theirs()
            for handle in (local.handle, local.program_handle):
                if handle is not None:
                    os.close(handle)
            local.handle = local.program_handle = None
            os.close(local.stacks)
            local.cell.close()


async def share_log(attempt: AttemptDir, ranks: LocalRanks) -> None:
    """Make the log of the first rank that of all ranks."""
    first, *others = ranks.by_rank
    with contextlib.suppress(OSError):  # only the command line misses it
        await start_detached(lambda: attempt.share_log(first, others))


OBEY_SECONDS = 3.0
"""Seconds to wait before checking on a fork server; it normally kills its ranks within milliseconds."""
TERM_SECONDS = 5.0
"""Seconds between SIGTERM and SIGKILL for a user's program."""


async def kill_generation(
    ranks: LocalRanks, link: ForkServerLink, *, politely: bool, term: float = TERM_SECONDS, obey: float = OBEY_SECONDS
) -> None:
    """Kill the ranks. Return once all are gone, or the fork server is lost and `kill_orphaned_ranks` takes over.
    If `politely`, first send SIGTERM to a user's program that has not received it; orch's own ranks ignore it.
    """
    if politely:
        link.signal_ranks(signal.SIGTERM)
        give_up = time.monotonic() + term
        while not (ranks.all_gone() or ranks.all_stopped()) and time.monotonic() < give_up:
            await asyncio.sleep(0.02)
    if ranks.all_gone():  # running ranks belong to the next generation
        return
    link.signal_ranks(signal.SIGKILL)
    while True:
        await asyncio.sleep(obey)
        if ranks.all_gone() or link.lost:
            return
        # A rank with memory pinned for a GPU takes a while to die. The fork server is not to blame, so it is kept.
        ranks.kill_uncollected()
        reason = _why_not_obeyed(ranks, link)
        if reason:
            link.kill(reason)


def _why_not_obeyed(ranks: LocalRanks, link: ForkServerLink) -> str:
    """Return why this fork server must be killed first. An uncollected dead rank is detected elsewhere."""
    if link.stopped():
        return "it was stopped when its ranks had to be killed"
    if any(local.pid is None and not local.gone for local in ranks.by_rank.values()):
        return "it did not report which processes it had to kill"
    return ""


_LONGEST = 30.0


async def kill_orphaned_ranks(
    ranks: LocalRanks,
    ended: Callable[[RankEnd], None],
    gone: Callable[[int], None],
    exclude: Collection[int] = (),
) -> None:
    """Kill the process groups of all remaining ranks and the processes that left those groups, and report each exit.
    `exclude` holds this process's children that are not ranks: checkpoint writers. A process that cannot be killed
    (hung in the kernel) is abandoned after half a minute and not reported as gone.
    """
    give_up = time.monotonic() + _LONGEST
    left = True
    while (left or not ranks.all_gone()) and time.monotonic() < give_up:
        ranks.kill_directly()
        for local in ranks.by_rank.values():
            if not local.gone:
                _collect(local, ended)
        _collect_other_children(ranks)
        for local in ranks.by_rank.values():
            if not local.gone and (local.pid is None or not kill_group(local.pid, 0)):
                if not local.ended:
                    local.ended = True
                    ended(RankEnd(rank=local.rank, reported=False))
                local.gone = True
                gone(local.rank)
        # Without a fork server, every other child of this process is a rank or was started by one.
        left = kill_children(exclude)
        await asyncio.sleep(0.01)


def _collect(local: LocalRank, ended: Callable[[RankEnd], None]) -> None:
    if local.pid is None or local.ended:
        return
    try:
        pid, status = os.waitpid(local.pid, os.WNOHANG)
    except ChildProcessError:  # the fork server had collected it before it died
        return
    if pid:
        local.ended = True
        code = os.waitstatus_to_exitcode(status)
        exit_code, number = (code, None) if code >= 0 else (None, -code)
        ended(RankEnd(rank=local.rank, exit_code=exit_code, signal=number, reported=False))


def _collect_other_children(ranks: LocalRanks) -> None:
    """Reap processes that ranks started; `_collect` reaps and reports the ranks themselves."""
    own = {local.pid for local in ranks.by_rank.values() if not local.ended}
    try:
        while (info := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and info.si_pid not in own:
            os.waitpid(info.si_pid, 0)
    except ChildProcessError:
        return


AGENT_KINDS = {
    "kill-agent": "SIGKILL to the agent of a node",
    "kill-node": "SIGKILL to the agent of a node and to everything it has started",
}
"""Faults that an agent injects into its own node. A rank injects the faults in `KINDS` itself."""

_BY_SIGNAL = {"kill-rank": signal.SIGKILL, "stop-rank": signal.SIGSTOP}
"""Kinds of faults that the agent injects immediately, without waiting for a step."""


def drill_order(request: Request, cluster: ClusterShape) -> tuple[InjectFault | None, str]:
    """Return the order for a drill request (None if it is refused) and the answer."""
    kind, at = request.detail, 0 if request.value is None else int(request.value)
    node = kind in AGENT_KINDS
    if not node and kind not in KINDS:
        return None, f"{REFUSED}no such drill: {kind}; available drills: {', '.join([*KINDS, *AGENT_KINDS])}"
    what, most = ("node", cluster.nodes) if node else ("rank", cluster.world_size)
    if not 0 <= at < most:
        return None, f"{REFUSED}there is no {what} {at}, only 0 to {most - 1}"
    return InjectFault(kind=kind, at=at, value=_VALUES.get(kind, 0.0)), f"{kind} strikes {what} {at}"


_VALUES = {"slow-rank": 0.3}
"""Seconds of extra work per step of a slow rank."""


def is_here(order: InjectFault, ranks: LocalRanks, node_rank: int | None) -> bool:
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
    elif local.program_handle is not None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            signal.pidfd_send_signal(local.program_handle, _BY_SIGNAL[kind])
    elif local.pid is not None and not local.ended:
        os.kill(local.pid, _BY_SIGNAL[kind])
