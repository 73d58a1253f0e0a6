"""The controller as a process: daemon, single pass, work after each pass, and queries from the command line."""

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Self

from orchestrator.controller.environment_search import SlurmWatch, adopt_at_start
from orchestrator.controller.nodes_to_avoid import RepairedNodes
from orchestrator.controller.reconcile import Controller, TickReport
from orchestrator.controller.record_writer import RecordWriter
from orchestrator.controller.submission_limits import NodesInService, PartitionSizes
from orchestrator.errors import Fenced, OrchError, Precondition, RegistryError, SchedulerChanged
from orchestrator.home import controller_log, make_state_home
from orchestrator.notifications.controller_pass import Notifications
from orchestrator.notifications.delivery import WITHIN
from orchestrator.observed_since import Clock, ObservedSince
from orchestrator.registry import fast_queries, versions
from orchestrator.registry import lease as leases
from orchestrator.registry.lease import (
    SLACK,
    Holder,
    acquire_once,
    displayed_state,
    host_file,
    host_name,
    is_awaited,
    single_waiter,
    wait_for_lease,
)
from orchestrator.registry.records import Lease
from orchestrator.registry.store import Store
from orchestrator.restore_tests.controller_pass import RestoreTests
from orchestrator.run_dirs.bounded_files import BoundedFiles
from orchestrator.scheduler.available_schedulers import FACTORIES, lease_key, make_instance, usable
from orchestrator.scheduler.job_environment import package_root
from orchestrator.scheduler.scheduler_instance import is_known, unknown_instance
from orchestrator.scheduler.slurm.own_order import OwnOrder, order_quietly
from orchestrator.scheduler.slurm.wait_figures import WaitFigures
from orchestrator.states import LIVE_RUNS
from trainer.protocol.config_sections.scheduler_kinds import LOCAL
from trainer.protocol.logs.log_rotation import LogFile, LogsConfig
from trainer.protocol.node_identity import boot_id


class RotatedLog(logging.Handler):
    """Handler for the controllers' log. It opens the file for each line, because several daemons share it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        try:
            with closing(LogFile(self._path, LogsConfig())) as file:
                file.write(self.format(record).encode(errors="replace") + b"\n")
        except OSError:
            self.handleError(record)


LAST_WORD_WITHIN = 5.0
"""Seconds a daemon waits for notifications in flight before it exits; its successor sends them again."""


@dataclass(frozen=True)
class AfterPass:
    """One controller's work after each pass: restore tests, notifications and repaired nodes."""

    controller: Controller
    tests: RestoreTests
    notifications: Notifications
    repaired: RepairedNodes

    @classmethod
    def for_controller(cls, controller: Controller) -> Self:
        store, owns, between = controller.store, controller.domain.has, controller.actor.renew_lease_if_due
        tests = RestoreTests(store, controller.files, owns, between)
        return cls(
            controller,
            tests,
            Notifications(store, owns, between),
            RepairedNodes(store, controller.schedulers),
        )

    def serve(self, epoch: int, now: float) -> list[str]:
        """Send due notifications and extend exclusions of nodes still out of service; return one line per action."""
        repaired = self.repaired.run(self.controller.domain.live, epoch, now)
        return [*repaired, *self.notifications.run(epoch, now)]

    def serve_and_wait(self, epoch: int, now: float) -> list[str]:
        """Call `serve`, then wait for notifications in flight, because no later pass will finish them."""
        done, deadline = self.serve(epoch, now), time.monotonic() + WITHIN
        while self.notifications.sending and (left := deadline - time.monotonic()) > 0:
            done += [*self.notifications.finish(epoch, left), *self.notifications.run(epoch, time.time())]
        return done


log = logging.getLogger("orch.controller")

IDLE_EXIT = 120.0  # seconds without a live run after which a daemon started by `orch submit` exits
SHORTEST, LONGEST = 1.0, 15.0  # seconds between passes: minimum while states change, maximum once nothing changes
LOOK = 0.5  # seconds between checks for news that needs no scheduler: requests, new runs, outcomes
STOP_WITHIN = 15.0  # seconds that `stop` waits for the daemon to finish its pass


@dataclass(frozen=True, kw_only=True)
class Health:
    """Liveness of a controller as seen from this host; `reason` explains it.

    `once`: the controller exits after a single pass. `seen`: its process is visible from this host.
    """

    alive: bool
    host: str | None
    pid: int | None
    epoch: int
    renewed_at: float | None
    ticked_at: float | None
    log: str
    once: bool = False
    seen: bool = False
    stalled: bool = False
    reason: str = ""
    scheduler: str = ""  # instance whose runs it drives (scheduler/scheduler_instance.py); empty: all


def status(store_path: Path, scheduler: str | None = None) -> Health:
    """Return the health of a scheduler's current or last controller (None: any scheduler's), without the ORM."""
    return _health(fast_queries.lease(store_path, scheduler))


def statuses(store_path: Path) -> list[Health]:
    """Return the health of each scheduler's controller, most recently alive first."""
    found = fast_queries.leases(store_path)
    return [_health(held) for held in found if held.holder or is_known(held.scheduler)]


def _health(held: Lease | None) -> Health:
    holder, state = Holder.parse(held.holder) if held is not None else None, displayed_state(held, time.time())
    return Health(
        alive=state.alive, host=holder.host if holder else None, pid=holder.pid if holder else None,
        epoch=held.epoch if held else 0, renewed_at=held.renewed_at if held else None,
        ticked_at=(held.ticked_at or None) if held else None, log=str(controller_log()),
        once=holder.once if holder else False, seen=holder.is_here if holder else False, stalled=state.stalled,
        reason=state.reason, scheduler=held.scheduler if held else "",
    )  # fmt: skip


def _upgrade(store_path: Path) -> None:
    """Upgrade the registry if its version is older. Raises RegistryError if it cannot be upgraded."""
    if versions.read_version(store_path) not in (None, versions.HEAD):
        Store.open(store_path).close()


def ensure_running(store_path: Path, kind: str = LOCAL) -> bool:
    """Start a controller of this user for this kind of scheduler unless one is alive; return whether one was started.

    The new process outlives the caller. If the current controller stalls, the new process takes over once the lease has
    expired. If the current controller is on another host, it may just have died, so a new process is started as well;
    it exits as soon as the other one renews its lease.
    """
    _upgrade(store_path)
    key = lease_key(kind)
    found = displayed_state(fast_queries.lease(store_path, key), time.time())
    # During a single pass, the new controller waits until that pass is done.
    if found.stays and (found.process_seen or is_awaited(store_path, key)):
        return False
    command = [sys.executable, "-P", "-m", "orchestrator.controller.service", str(store_path.absolute()), kind]
    # WARNING: setproctitle overwrites the environment's memory unless SPT_NOENV is set.
    environment = {**os.environ, "SPT_NOENV": "1", "ORCH_HOME": str(make_state_home())}
    if "ORCH_REGISTRY" in environment:  # the daemon has a different working directory
        environment["ORCH_REGISTRY"] = str(store_path.absolute())
    if root := package_root():
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    log_file = str(controller_log())
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    # In a separate session it outlives the terminal; no process waits for it.
    os.posix_spawn(
        sys.executable, command, environment, setsid=True,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, log_file, flags, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
            *((os.POSIX_SPAWN_CLOSE, number) for number in _inheritable_descriptors()),
        ],
    )  # fmt: skip
    return not found.stays


def _inheritable_descriptors() -> list[int]:
    """Return the descriptors above 2 that a child would inherit, e.g. a flock(1) lock or a pipe to a waiting reader."""
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # closed in the meantime, like the descriptor of the directory listing itself
            if number > 2 and os.get_inheritable(number):
                found.append(number)
    return found


def stop(store_path: Path) -> bool:
    """Stop this host's controllers and return whether there were any. Raises Precondition if none can be reached."""
    now = time.time()
    states = [(Holder.parse(lease.holder), displayed_state(lease, now)) for lease in fast_queries.leases(store_path)]
    # A controller that has stalled on another host cannot be stopped; a successor replaces it.
    live = [holder for holder, state in states if holder and not state.once and state.may_write]
    for holder in [holder for holder in live if holder.is_here] or live[:1]:
        _stop(holder)
    return bool(live)


def _stop(holder: Holder) -> None:
    if not holder.is_here:
        inside = " in its container, or on the other machine of this name" if holder.host == host_name() else ""
        hint = f"type `orch controller stop` on {holder.host}{inside}"
        raise Precondition(f"the controller runs on {holder.host}{inside}", where=f"pid {holder.pid}", hint=hint)
    os.kill(holder.pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_WITHIN
    while holder.lives and time.monotonic() < deadline:
        time.sleep(0.05)
    if holder.lives:
        what = f"the controller (pid {holder.pid}) is still in a pass after {STOP_WITHIN:.0f} s"
        hint = f"wait, or end it with `kill -9 {holder.pid}`: killing it is safe at any time"
        raise Precondition(what, where=str(controller_log()), hint=hint)


@contextmanager
def _controller(store_path: Path, kind: str, key: str, *, daemon: bool = False) -> Iterator[Controller]:
    clock = Clock()
    make_state_home()
    with Store.open(store_path) as store:
        observed = ObservedSince(clock.mono, host_file(store_path, "watch", key), boot_id())
        files = BoundedFiles()
        controller = Controller(
            store, usable(kind, daemon=daemon), clock=clock, observed=observed, pool_size=PartitionSizes(),
            usable_nodes=NodesInService(), files=files, instance=make_instance(kind),
        )  # fmt: skip
        controller.queries.quiet = FACTORIES[kind].quiet if daemon else 0.0
        controller.actor.describe_wait, controller.order_jobs = WaitFigures(), partial(order_quietly, OwnOrder())
        files.between = controller.actor.renew_lease_if_due
        store.database.after_commit = records = RecordWriter(store, files)
        try:
            yield controller
        finally:
            records.write_owed()


def tick_once(
    store_path: Path, kind: str = LOCAL, *, patience: float | None = None, force_tests: bool = False
) -> TickReport | None:
    """Run a single pass over this kind of scheduler's runs; return None if another controller is alive.

    `force_tests` starts restore tests regardless of schedule and budget. If a controller has stalled, this waits for
    its lease to expire, for at most `patience` seconds, and replaces it. Raises RegistryError.
    """
    adopt_at_start(store_path, kind)
    key = lease_key(kind)
    _upgrade(store_path)
    found = displayed_state(fast_queries.lease(store_path, key), time.time())
    if found.alive and not found.may_take:
        return None
    with _controller(store_path, kind, key) as controller:
        lease = acquire_once(
            controller.store, controller.observed, key, leases.LEASE_TTL + SLACK if patience is None else patience
        )
        if lease is None:
            controller.observed.save()
            return None
        try:
            report, after = controller.tick(lease), AfterPass.for_controller(controller)
            begun = after.tests.run(controller.actor.epoch, time.time(), look=True, force=force_tests)
            # Launch the new runs now, because the next pass may be much later.
            report = replace(report, actions=(*report.actions, *begun))
            report = report.plus(controller.tick(controller.actor.lease)) if begun else report
            done = after.serve_and_wait(controller.actor.epoch, time.time())
            return replace(report, actions=(*report.actions, *done))
        finally:
            controller.store.drop_lease(controller.actor.lease)


def run_daemon(store_path: Path, idle_exit_s: float | None = None, kind: str = LOCAL) -> None:
    """Drive runs until SIGTERM, Ctrl-C, loss of the lease, or `idle_exit_s` seconds without a live run."""
    from setproctitle import setproctitle

    os.environ.setdefault("SPT_NOENV", "1")
    setproctitle(f"orch-controller {store_path}")
    adopt_at_start(store_path, kind)
    with _controller(store_path, kind, lease_key(kind), daemon=True) as controller:
        Daemon(controller, idle_exit_s, kind).run()


class Daemon:
    """Main loop of one controller process."""

    def __init__(self, controller: Controller, idle_exit_s: float | None, kind: str = LOCAL) -> None:
        self.controller, self.idle_exit_s, self.kind = controller, idle_exit_s, kind
        self.stopping = False
        self._after = AfterPass.for_controller(controller)
        self._watch = SlurmWatch(controller.store.database.path, kind, controller)
        self._lease: Lease | None = None
        self._served: set[str] = set()  # schedulers for which it has held a lease
        self._pause = SHORTEST
        self._idle_since: float | None = None

    def run(self) -> None:
        """Acquire the lease and repeat passes over the runs until stopped."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        while not self.stopping and self._turn():
            pass
        if self._lease is not None:
            self._let_lease_go()
        log.info("controller ends")

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopping = True

    def _await_lease(self) -> Lease | None:
        """Return the lease; None if another controller is alive or another process already waits for it."""
        instance = self.controller.domain.instance
        key = (instance() or unknown_instance(self.kind)) if instance is not None else ""
        store, observed = self.controller.store, self.controller.observed
        with single_waiter(store.database.path, key) as only:
            return wait_for_lease(store, observed, key, lambda: self.stopping) if only else None

    def _turn(self) -> bool:
        """Run one pass and the work after it; return whether to continue. Expected errors are logged, not raised."""
        report = None
        try:
            if self._lease is None:
                self._lease = self._await_lease()
                if self._lease is None:
                    if self.stopping or not self._left_behind():
                        return False
                    self._rest(None)
                    return True
                self._served.add(self._lease.scheduler)
                words = "controller of %s with epoch %d on %s, pid %d"
                log.info(words, self._lease.scheduler, self._lease.epoch, host_name(), os.getpid())
            report = self._tick(self._lease)
            self._lease = self.controller.actor.lease
            if self._is_idle(report) and self._leave():
                return False
        except SchedulerChanged as error:
            # Commands have reached a different scheduler. A scheduler that does not answer never causes this.
            log.warning("%s: giving it up", error.what)
            self._let_lease_go()
        except Fenced as error:
            # This process stalled for too long. Its successor may be a single pass that has already exited.
            log.warning("%s: this controller lost the lease", error.what)
            self._lease = None
            return True
        except (OrchError, OSError) as error:
            # A transient failure of the registry or the file system must not leave the runs without a controller.
            log.error("this pass failed and will be retried: %s", error)
        self._rest(report)
        return True

    def _leave(self) -> bool:
        """Give up the lease; return False if a run or request arrived while this controller still held it."""
        self._give_back()
        if self.controller.domain.count() == 0 and not self.controller.domain.has_pending_request():
            return True
        self._pause = SHORTEST
        return False

    def _give_back(self) -> None:
        lease, self._lease = self._lease, None
        assert lease is not None
        self._after.notifications.finish(lease.epoch, LAST_WORD_WITHIN)
        self.controller.store.drop_lease(lease)

    def _let_lease_go(self) -> None:
        try:
            self._give_back()
        except (OrchError, OSError) as error:
            log.warning("the lease could not be given up and will expire: %s", error)

    def _left_behind(self) -> bool:
        """Return whether live runs of a scheduler that this daemon has served have no controller."""
        store, now = self.controller.store, time.time()
        owners = {run.scheduler for run in store.runs(LIVE_RUNS)} & (self._served - {""})
        return any(not displayed_state(store.lease(owner), now).alive for owner in owners)

    def _tick(self, lease: Lease) -> TickReport:
        report = self.controller.tick(lease)
        self.controller.store.database.after_commit(set())  # writes overdue records
        epoch, now = self.controller.actor.epoch, time.time()
        tests, done = self._after.tests.run(epoch, now), self._after.serve(epoch, now)
        changed = self._watch.after(report) or report.changed or bool(tests)
        report = replace(report, changed=changed, actions=(*report.actions, *tests, *done))
        for line in (*report.actions, *report.errors):
            log.info("%s", line)
        for kind in report.unreachable:
            log.warning("%s does not answer: nothing is assumed", kind)
        return report

    def _is_idle(self, report: TickReport) -> bool:
        if report.live > 0 or self._left_behind() or self._after.notifications.pending:
            self._idle_since = None
            return False
        now = time.monotonic()
        self._idle_since = now if self._idle_since is None else self._idle_since
        return self.idle_exit_s is not None and now - self._idle_since >= self.idle_exit_s

    def _rest(self, report: TickReport | None) -> None:
        """Sleep until the next pass, or until there is news that needs no scheduler."""
        changed = report is not None and report.changed
        self._pause = SHORTEST if changed else min(LONGEST, self._pause * 1.5)
        until = time.monotonic() + min(self._pause, max(SHORTEST, self.controller.queries.seconds_left()))
        before = self._news()
        while not self.stopping and time.monotonic() < until:
            time.sleep(min(LOOK, max(0.0, until - time.monotonic())))
            now = self._news()
            if before is not None and now is not None and now != before:
                self._pause = SHORTEST
                return
            before = before if now is None else now

    def _news(self) -> tuple[object, ...] | None:
        try:
            return self.controller.news()
        except (RegistryError, OSError) as error:
            log.warning("%s", error)
            return None


def main() -> None:
    """Run the daemon that `ensure_running` starts."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", handlers=[RotatedLog(controller_log())]
    )  # fmt: skip
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # an inherited mask could keep `orch controller stop` from working
    os.chdir("/")  # so that the daemon does not keep a file system busy
    try:
        run_daemon(Path(sys.argv[1]), IDLE_EXIT, *sys.argv[2:3])
    except Exception:  # outermost edge: the log is the only record of why a daemon died
        log.exception("the controller died")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
