"""The ranks of one generation on one node: cells, control sockets, PIDs and exits."""

import contextlib
import os
import signal
import socket
from dataclasses import dataclass, field

from trainer.agent.control import unix_transport
from trainer.agent.processes.proc import OomKills
from trainer.agent.processes.process_tree import kill_group
from trainer.protocol.messages.agents import ProgressReport
from trainer.protocol.messages.codec import MessageError
from trainer.protocol.messages.ranks import FROM_RANK, FromRank, ReportedEnd, Store
from trainer.protocol.rank_progress.progress import Progress, ProgressCell, StopReason
from trainer.protocol.rank_progress.rank_messages import receive_message, send_message


@dataclass(kw_only=True)
class LocalRank:
    """Local rank as its agent knows it."""

    rank: int
    cell: ProgressCell
    control: socket.socket
    theirs: socket.socket | None
    stacks: int  # memfd that receives its stacks
    pid: int | None = None
    handle: int | None = None  # pidfd
    ended: bool = False
    gone: bool = False
    reported: bool = False  # its exit was reported to the coordinator
    last: Progress = field(default_factory=Progress)
    reported_end: ReportedEnd | None = None  # its own report of its end, over its control socket

    def descriptors(self) -> list[int]:
        assert self.theirs is not None
        return [self.cell.descriptor, self.theirs.fileno(), self.stacks]

    def close_theirs(self) -> None:
        """Close the rank's end of the control socket, which the rank now holds."""
        if self.theirs is not None:
            self.theirs.close()
            self.theirs = None

    def receive_message(self) -> FromRank | MessageError | None:
        """Return its next message, if any; its exit report is also kept."""
        try:
            message = receive_message(self.control, FROM_RANK)
        except OSError:
            return None
        except MessageError as error:  # truncated or forged
            return error
        if isinstance(message, ReportedEnd):
            self.reported_end = message
        return message

    def read_progress(self) -> Progress:
        """Return the newest consistent reading; a torn one (the rank died while writing) is ignored."""
        reading = self.cell.read()
        if reading is not None:
            self.last = reading
        return self.last

    def has_stepped(self) -> bool:
        """Return whether this generation has trained a step."""
        return self.last.step > self.last.restored_step


class LocalRanks:
    """All ranks of one generation on this node."""

    def __init__(self, generation: int, ranks: range) -> None:
        self.generation = generation
        self.killed = False
        self.oom_kills = OomKills()
        self.by_rank: dict[int, LocalRank] = {}
        for rank in ranks:
            ours, theirs = unix_transport.pair()
            ours.setblocking(False)
            cell = ProgressCell.create(f"orch-progress-{rank}")
            stacks = os.memfd_create(f"orch-stacks-{rank}", os.MFD_CLOEXEC)
            self.by_rank[rank] = LocalRank(rank=rank, cell=cell, control=ours, theirs=theirs, stacks=stacks)

    def memory_kill(self, rank: int, number: int | None) -> str:
        """Describe the kernel's out-of-memory kill of this rank; empty if it was not one."""
        return self.oom_kills.words(self.by_rank[rank].pid) if number == signal.SIGKILL else ""

    def ask(self, reason: StopReason, deadline: float) -> None:
        """Write a request into every cell; `deadline` is on this node's monotonic clock."""
        for local in self.by_rank.values():
            local.cell.ask_stop(reason, deadline)

    def expect_stop(self, at: float) -> None:
        """Announce to every rank when it will be asked to stop, on this node's monotonic clock."""
        for local in self.by_rank.values():
            local.cell.expect_stop(at)

    def forward_store(self, store: Store) -> None:
        """Send the store's address, created by rank 0, to every other rank."""
        for local in self.by_rank.values():
            if local.rank != 0 and not local.ended:
                with contextlib.suppress(OSError):  # it has died; its exit is on its way
                    send_message(local.control, store)

    def all_gone(self) -> bool:
        return all(local.gone for local in self.by_rank.values())

    def all_reported(self) -> bool:
        """Return whether all are gone and their exits were reported to the coordinator."""
        return all(local.gone and local.reported for local in self.by_rank.values())

    def mark_never_started(self) -> None:
        """Mark all ranks as ended; no process was started for any of them."""
        for local in self.by_rank.values():
            local.ended = local.gone = local.reported = True

    def summary(self) -> ProgressReport:
        """Return the slowest rank's step and phase and the first rank's loss."""
        readings = [(local, local.read_progress()) for local in self.by_rank.values()]
        slowest = min((reading for _, reading in readings), key=lambda reading: reading.step)
        first_rank, first = readings[0]
        return ProgressReport(
            generation=self.generation,
            step=slowest.step,
            phase=slowest.phase.name.lower(),
            loss=first.loss if first_rank.has_stepped() else None,
            saved=max(reading.saved_step for _, reading in readings),
            total=max(reading.total_steps for _, reading in readings),
            restored=max(reading.restored_step for _, reading in readings),
            save_seconds=max(reading.save_seconds for _, reading in readings),
            step_seconds=max(reading.step_seconds for _, reading in readings),
            stepped=all(local.has_stepped() for local in self.by_rank.values()),
        )

    def kill_directly(self) -> None:
        """Kill ranks without a fork server; they are now children of this process, with their own process groups."""
        for local in self.by_rank.values():
            if local.pid is not None and not local.gone:
                kill_group(local.pid, signal.SIGKILL)

    def kill_uncollected(self) -> None:
        """Kill ranks while the fork server may reap them at any time; until then a group's number is not reused."""
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
            if local.handle is not None:
                os.close(local.handle)
                local.handle = None
            os.close(local.stacks)
            local.cell.close()
