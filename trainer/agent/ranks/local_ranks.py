"""The ranks of one generation on one node: their cells, control sockets, pids and ends."""

import contextlib
import os
import signal
import socket
from dataclasses import dataclass, field

from trainer.agent.control import unix_transport
from trainer.agent.processes.proc import OomKills
from trainer.agent.processes.process_tree import kill_group
from trainer.contract.messages.agents import ProgressReport
from trainer.contract.messages.codec import MessageError
from trainer.contract.messages.ranks import FROM_RANK, FromRank, ReportedEnd, Store
from trainer.contract.ranks.progress import Progress, ProgressCell, StopReason
from trainer.contract.ranks.rank_messages import receive_message, send_message


@dataclass(kw_only=True)
class LocalRank:
    """One rank as its agent knows it."""

    rank: int
    cell: ProgressCell
    control: socket.socket
    theirs: socket.socket | None
    stacks: int  # memfd that its stacks are written to
    pid: int | None = None
    handle: int | None = None  # pidfd
    ended: bool = False
    gone: bool = False
    reported: bool = False  # its exit was reported to the coordinator
    last: Progress = field(default_factory=Progress)
    reported_end: ReportedEnd | None = None  # how it reported its end, over its control socket

    def descriptors(self) -> list[int]:
        assert self.theirs is not None
        return [self.cell.descriptor, self.theirs.fileno(), self.stacks]

    def close_theirs(self) -> None:
        """The rank has its end of the control socket."""
        if self.theirs is not None:
            self.theirs.close()
            self.theirs = None

    def receive_message(self) -> FromRank | MessageError | None:
        """Its next message, if there is one; how it reports its own end is kept as well."""
        try:
            message = receive_message(self.control, FROM_RANK)
        except OSError:
            return None
        except MessageError as error:  # cut off, or made up
            return error
        if isinstance(message, ReportedEnd):
            self.reported_end = message
        return message

    def read_progress(self) -> Progress:
        """The newest consistent reading; a torn one (the rank died while writing) leaves the one before."""
        reading = self.cell.read()
        if reading is not None:
            self.last = reading
        return self.last

    def stepped(self) -> bool:
        """Whether this generation has trained a step."""
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
        """How the kernel killed this rank for lack of memory, in words; empty when the signal was no such kill."""
        return self.oom_kills.words(self.by_rank[rank].pid) if number == signal.SIGKILL else ""

    def ask(self, reason: StopReason, deadline: float) -> None:
        """Write a request into every cell; `deadline` is on this node's monotonic clock."""
        for local in self.by_rank.values():
            local.cell.ask_stop(reason, deadline)

    def expect_stop(self, at: float) -> None:
        """Tell every rank when it will be asked to stop, on this node's monotonic clock."""
        for local in self.by_rank.values():
            local.cell.expect_stop(at)

    def pass_on(self, store: Store) -> None:
        """Tell every rank where the store is; rank 0 has made it."""
        for local in self.by_rank.values():
            if local.rank != 0 and not local.ended:
                with contextlib.suppress(OSError):  # it has died; its exit is on its way
                    send_message(local.control, store)

    def all_gone(self) -> bool:
        return all(local.gone for local in self.by_rank.values())

    def all_reported(self) -> bool:
        """Whether all are gone and the coordinator knows of each how it ended."""
        return all(local.gone and local.reported for local in self.by_rank.values())

    def mark_never_started(self) -> None:
        """No process was started for any of them."""
        for local in self.by_rank.values():
            local.ended = local.gone = local.reported = True

    def summary(self) -> ProgressReport:
        """The slowest rank's step and phase, the first one's loss."""
        readings = [(local, local.read_progress()) for local in self.by_rank.values()]
        slowest = min((reading for _, reading in readings), key=lambda reading: reading.step)
        first_rank, first = readings[0]
        return ProgressReport(
            generation=self.generation,
            step=slowest.step,
            phase=slowest.phase.name.lower(),
            loss=first.loss if first_rank.stepped() else None,
            saved=max(reading.saved_step for _, reading in readings),
            total=max(reading.total_steps for _, reading in readings),
            restored=max(reading.restored_step for _, reading in readings),
            save_seconds=max(reading.save_seconds for _, reading in readings),
            step_seconds=max(reading.step_seconds for _, reading in readings),
            stepped=all(local.stepped() for local in self.by_rank.values()),
        )

    def kill_directly(self) -> None:
        """Without a fork server: its ranks have become this process's children, their groups are still theirs."""
        for local in self.by_rank.values():
            if local.pid is not None and not local.gone:
                kill_group(local.pid, signal.SIGKILL)

    def kill_uncollected(self) -> None:
        """With a fork server that may collect them at any moment: until then a group's number is not used again."""
        for local in self.by_rank.values():
            if local.pid is None or local.handle is None or local.ended:
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):  # collected, or another user's by now
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
