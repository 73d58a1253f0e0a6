"""Import from run directories into the registry: new events since the last pass, and the newest progress."""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from checkpointing.config import MEMORY
from checkpointing.storage.backends import LocalStorage
from orchestrator.recovery.node_exclusion import DRILLED
from orchestrator.registry.records import Attempt, Checkpoint, CheckpointCopy, Generation, Notice
from orchestrator.registry.store import Store
from orchestrator.run_dirs.bounded_files import DirectFiles, Files
from orchestrator.run_dirs.controlled_run import ControlledRun
from orchestrator.run_dirs.event_files import (
    KnownProgress,
    NewEvents,
    TierPaths,
    event_files,
    first_node,
    progress,
    read_new_events,
    resolve_paths,
    tiers_mentioned,
)
from orchestrator.run_dirs.reader_pins import remove_dead_readers
from orchestrator.states import Trust, may_move
from trainer.protocol.config_sections.scheduler_kinds import traits
from trainer.protocol.events import Event, EventKind
from trainer.protocol.user_code.code_record import CodeRecord

UNREADABLE_EVENT = "event.unreadable"  # notice kind for an event that lacks required fields

log = logging.getLogger(__name__)


def ingest(store: Store, view: ControlledRun, *, epoch: int, now: float, files: Files | None = None) -> bool:
    """Store the newest attempt's new events and progress; return whether there were any.

    Raises RunDirHangs.
    """
    files, place = files or DirectFiles(), view.attempt_dir
    names = files.call(view.folder.path, lambda: event_files(place))
    cursors = store.cursors(view.run.name)
    # Files are read independently. A delay of one pass, or a different order of files, does no harm.
    fresh = files.call(
        view.folder.path, lambda: [one for path in names if (one := read_new_events(view, path, cursors))]
    )
    if fresh:
        tiers = tiers_mentioned(store, view, fresh)
        node = next(iter(store.attempt(view.run.name, view.last.number).nodes), None) or first_node(fresh)
        paths = files.call(view.folder.path, lambda: resolve_paths(view, node, tiers))
        for one in fresh:
            _apply(store, view, one, paths, epoch, now)
        # The job deletes checkpoints after each commit, but its nodes cannot tell if a reader on this host has died.
        if any(event.kind == EventKind.CHECKPOINT_COMMITTED for one in fresh for event in one.events):
            files.call(view.folder.path, lambda: remove_dead_readers(LocalStorage(view.folder.checkpoints)))
    known = files.call(view.folder.path, lambda: progress(place))
    return _ingest_progress(store, view, epoch, now, known) or bool(fresh)


def _apply(store: Store, view: ControlledRun, fresh: NewEvents, paths: TierPaths, epoch: int, now: float) -> None:
    def take() -> None:
        # Rows and cursor share a transaction, so that an event counts once even if the controller dies.
        for event in fresh.events:
            _handle(_EventWriter(store, view, event, epoch, now, paths))
        store.set_cursor(view.run.name, fresh.name, fresh.end, epoch=epoch)

    store.together(take)


def _handle(writer: "_EventWriter") -> None:
    handler = _HANDLERS.get(writer.event.kind)
    if handler is None:
        return
    try:
        handler(writer)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        # The event is damaged or from another version. Judge the run by all other events.
        why = f"without {error}" if isinstance(error, KeyError) else str(error)
        log.warning("%s/%d: event %s cannot be read: %s", writer.run, writer.attempt, writer.event.kind, why)
        _notice(writer, "", unread=writer.event.kind, reason=why, kind=UNREADABLE_EVENT)


class _EventWriter:
    """Writer of one event into the registry."""

    def __init__(
        self, store: Store, view: ControlledRun, event: Event, epoch: int, now: float, paths: TierPaths
    ) -> None:  # fmt: skip
        self.store, self.view, self.event, self.epoch, self.now, self.paths = store, view, event, epoch, now, paths
        self.run, self.attempt = view.run.name, view.last.number

    @property
    def data(self) -> dict[str, Any]:
        return self.event.data

    @property
    def step(self) -> int:
        return int(self.data["step"])

    @property
    def name(self) -> str:
        return str(self.data["name"])

    @property
    def bytes(self) -> int:
        return int(self.data.get("bytes") or 0)

    def row(self) -> Attempt:
        return self.store.attempt(self.run, self.attempt)

    def note(self, **changes: Any) -> None:
        self.store.note_attempt(self.run, self.attempt, epoch=self.epoch, **changes)

    def generation(self, **changes: Any) -> None:
        known = [g for g in self.store.generations(self.run, self.attempt) if g.number == self.event.generation]
        before = known[0] if known else Generation(
            run=self.run, attempt=self.attempt, number=self.event.generation, started_at=self.event.time
        )  # fmt: skip
        self.store.put_generation(replace(before, **changes), epoch=self.epoch)

    def is_drilled(self) -> bool:
        """Return whether the configuration requests a drill in the event's generation."""
        place = (self.attempt, self.event.generation)
        faults = ((each.attempt, each.generation) for each in self.view.config.drill.events)
        return any(all(wanted in (0, number) for wanted, number in zip(fault, place, strict=True)) for fault in faults)

    def known(self, name: str = "") -> Checkpoint | None:
        """Return the row of the checkpoint with this name (default: the event's checkpoint)."""
        name = name or self.name
        rows = {item.name: item for item in self.store.checkpoints(self.run)}
        found = rows.get(name)
        if found is None or found.trust is not Trust.DELETED:
            return found
        # A program's own checkpoint gets a new row each time it is moved back or rewritten.
        again = (".back", ".anew")
        back = [item for item in rows.values() if item.name.startswith(f"{name}.") and item.name.endswith(again)]
        return next((item for item in back if item.trust is not Trust.DELETED), found)

    def doubt(self, item: Checkpoint | None, to: Trust, reason: str) -> None:
        """Change the trust of a checkpoint if the table of transitions permits it."""
        if item is not None and item.trust != to and may_move(item.trust, to):
            self.store.trust(self.run, item.name, to, reason, epoch=self.epoch, now=self.now)

    def elsewhere(self) -> str:
        """Return the event's tier if it is not the checkpoint's own tier; otherwise empty."""
        tier, item = str(self.data.get("tier") or ""), self.known()
        home = "" if item is None else item.tier or str(self.view.folder.checkpoints)
        return tier if tier and not self.paths.same(tier, home) else ""

    def leave_home(self, trust: Trust, reason: str) -> None:
        """Replace a checkpoint that is bad in its own tier with a copy, or change its trust if it has no copies."""
        item, name = self.known(), self.name
        copies = [copy for copy in self.store.copies(self.run) if copy.name == name]
        if item is None or item.trust is Trust.DELETED or not copies:
            self.doubt(item, trust, reason)
            return
        own = str(self.view.folder.checkpoints)
        chosen = min(copies, key=lambda copy: (not self.paths.same(copy.tier, own), copy.copied_at))
        self.store.rehome(chosen, f"{reason}; there is a copy in {chosen.tier}", epoch=self.epoch)


def _attempt_started(writer: _EventWriter) -> None:
    nodes = tuple(writer.data.get("nodes", ()))
    began = writer.data.get("began")  # nodes may join later
    # A node's clock may be hours ahead, but the run time ends by the controller's clock.
    started = min(float(began) if began else writer.event.time, writer.now)
    writer.note(started_at=started, nodes=nodes)
    for node in nodes:
        writer.store.saw_node(node, writer.view.run.domain, epoch=writer.epoch, now=writer.now)


def _generation_started(writer: _EventWriter) -> None:
    writer.generation(started_at=writer.event.time)
    writer.note(generations=max(writer.row().generations, writer.event.generation))


def _first_step(writer: _EventWriter) -> None:
    row = writer.row()
    if row.first_step is not None:
        return
    step = writer.step
    writer.note(first_step=step)
    # If a later generation's resume was read first, from another file, it is not where the attempt began.
    if row.resumed_from is not None and row.resumed_from >= step:
        writer.note(resumed_from=None)


def _generation_ended(writer: _EventWriter) -> None:
    writer.generation(
        ended_at=writer.event.time,
        last_step=writer.step if writer.data.get("step") is not None else None,
        reason=writer.data.get("reason", ""),
        failure=writer.data.get("failure"),
    )


def _record_commit(writer: _EventWriter) -> None:
    step, name, tier = writer.step, writer.name, writer.paths.first_tier
    checkpoint = Checkpoint(
        run=writer.run, name=name, step=step, attempt=writer.attempt, trust=Trust.COMMITTED, bytes=writer.bytes,
        path=f"{tier or writer.view.folder.checkpoints}/{name}", committed_at=writer.event.time, tier=tier,
        seconds=writer.data.get("seconds"), stall=writer.data.get("stall"),
        manifest=str(writer.data.get("manifest") or ""),
    )  # fmt: skip
    writer.store.put_checkpoint(checkpoint, epoch=writer.epoch)
    writer.note(saved_step=max(step, writer.row().saved_step or 0))


def _record_flush(writer: _EventWriter) -> None:
    tier, name, at = writer.data["tier"], writer.name, writer.event.time
    path = f"{tier}/{name}"
    copy = CheckpointCopy(run=writer.run, name=name, tier=tier, path=path, bytes=writer.bytes, copied_at=at)
    if writer.known() is not None:
        writer.store.put_copy(copy, epoch=writer.epoch)


def _record_suspicion(writer: _EventWriter) -> None:
    """Mark checkpoints as suspect if the coordinator says so. Ranks only report which ones they skipped."""
    if writer.event.source.startswith("rank-"):
        return
    for item in writer.store.checkpoints(writer.run):
        # A checkpoint of the same step that was saved later holds a different state.
        if item.step == writer.step and item.committed_at <= writer.event.time:
            writer.doubt(item, Trust.SUSPECT, str(writer.data.get("reason", "suspect")))


def _record_program_checkpoint(writer: _EventWriter) -> None:
    """Record a checkpoint of a user's own program. It cannot be verified, so its trust stays COMMITTED."""
    step, path = writer.step, str(writer.data["path"])
    anew = str(writer.data.get("anew") or "")
    new, known = bool(writer.data.get("new")), writer.known(anew) is not None
    # A new checkpoint found at an attempt's start was written at the end of the previous attempt.
    written_by = writer.attempt if new or known else max(1, writer.attempt - 1)
    damage = str(writer.data.get("damage") or "")
    was = str(writer.data.get("was") or "")
    # A sign of damage may be wrong, and the program may rewrite the file. It is CORRUPT only if it was set aside.
    checkpoint = Checkpoint(
        run=writer.run, name=writer.name, step=step, attempt=written_by,
        trust=Trust.CORRUPT if damage and was else Trust.COMMITTED,
        reason=f"attempt {writer.attempt} saw that it {damage}" if damage else "",
        bytes=writer.bytes, path=path, committed_at=writer.event.time, tier=os.path.dirname(path),
    )  # fmt: skip
    if was:  # it was set aside and is back in place
        writer.doubt(writer.known(was), Trust.DELETED, f"moved back to {path}")
    if anew:  # trust in the previous bytes does not extend to these
        writer.doubt(writer.known(anew), Trust.DELETED, f"rewritten by attempt {writer.attempt}")
    writer.store.put_checkpoint(checkpoint, epoch=writer.epoch)
    found_later = written_by < writer.attempt and not known and not writer.data.get("before_run")
    if not was and (new or found_later):
        before = writer.store.attempt(writer.run, written_by).saved_step
        writer.store.note_attempt(writer.run, written_by, epoch=writer.epoch, saved_step=max(step, before or 0))


def _record_verified(writer: _EventWriter) -> None:
    """Trust a checkpoint of a user's own program that matches its seal."""
    if (known := writer.known()) is not None and known.trust is Trust.COMMITTED:
        writer.doubt(known, Trust.VERIFIED, f"attempt {writer.attempt} compared it with its seal")


def _record_set_aside(writer: _EventWriter) -> None:
    path = str(writer.data["path"])
    if writer.known() is None:  # set aside before it was reported
        checkpoint = Checkpoint(
            run=writer.run, name=writer.name, step=writer.step, attempt=max(1, writer.attempt - 1),
            trust=Trust.COMMITTED, bytes=writer.bytes, path=path, committed_at=writer.event.time,
            tier=os.path.dirname(path),
        )  # fmt: skip
        writer.store.put_checkpoint(checkpoint, epoch=writer.epoch)
    reason = f"set aside as {path}: {writer.data.get('reason', '')}"
    writer.doubt(writer.known(), Trust.CORRUPT if writer.data.get("damaged") else Trust.SUSPECT, reason)
    now = writer.known()
    assert now is not None
    writer.store.move_checkpoint(writer.run, now.name, path, epoch=writer.epoch)


def _record_restore(writer: _EventWriter) -> None:
    step = writer.step
    writer.generation(resumed_from=step, tier=str(writer.data.get("tier") or ""))
    row = writer.row()
    # A later generation resumes from a state that this attempt has trained.
    if row.resumed_from is None and (row.first_step is None or row.first_step > step):
        writer.note(resumed_from=step)
    if writer.data.get("tier") == MEMORY:
        return  # its bytes on the disk were not read
    known = writer.known()
    if known is not None and known.trust in (Trust.SUSPECT, Trust.CORRUPT):
        return  # only a restore test reverses a verdict, not a resume
    writer.doubt(writer.known(), Trust.RESTORED, f"attempt {writer.attempt} resumed from it")


def _record_refusal(writer: _EventWriter) -> None:
    if writer.elsewhere() != MEMORY and writer.data.get("damaged") is not False:  # else no disk fault is known
        reason = str(writer.data.get("reason", "refused"))
        _remove(writer, Trust.CORRUPT, f"attempt {writer.attempt} refused it: {reason}")


def _record_deletion(writer: _EventWriter) -> None:
    _remove(writer, Trust.DELETED, f"deleted by attempt {writer.attempt}: newer checkpoints are kept")


def _remove(writer: _EventWriter, trust: Trust, reason: str) -> None:
    """Drop the copy in the event's tier, or replace the checkpoint if that is its own tier."""
    if tier := writer.elsewhere():
        writer.store.drop_copy(writer.run, writer.name, tier, epoch=writer.epoch)
    else:
        writer.leave_home(trust, reason)


def _notice(writer: _EventWriter, node: str | None = None, *, kind: str = "", **more: Any) -> None:
    event = writer.event
    if node is None:
        node = str(writer.data.get("node") or "")
    # Ranks number their events afresh in every generation.
    source = f"{event.source}/{event.generation}" if event.source.startswith("rank-") else event.source
    drilled = {DRILLED: True} if writer.is_drilled() else {}
    notice = Notice(
        run=writer.run, attempt=writer.attempt, source=source, seq=event.seq, kind=kind or str(event.kind),
        generation=event.generation, time=event.time, node=node, data={**writer.data, **drilled, **more},
    )  # fmt: skip
    writer.store.put_notice(notice, epoch=writer.epoch)


def _code_changed(writer: _EventWriter) -> None:
    """Store a code change. It counts as accepted if the user resumed with this code and these packages."""
    known = CodeRecord.from_identity(writer.view.run.identity)
    files, packages = writer.data.get("files") or {}, writer.data.get("packages") or {}
    accepted = False
    if known is not None:
        same_files = all(name in known.files and known.files[name].sha256 == files[name] for name in files)
        versions = known.packages or {}
        accepted = same_files and all(versions.get(name, "none") == packages[name] for name in packages)
    _notice(writer, "", accepted=accepted and bool(files or packages))


def _preflight(writer: _EventWriter) -> None:
    """Store a failed preflight under the node's name. An agent's index has no meaning outside the job."""
    if not writer.data["ok"]:
        _notice(writer, str(writer.data.get("name") or ""))


def _spare_used(writer: _EventWriter) -> None:
    """Store the loss of a node that a spare replaced. The attempt continues, so no failure reports the node."""
    lost, cluster = str(writer.data["instead"]), writer.view.run.domain
    _notice(writer, lost)
    if lost and not traits(writer.view.run.cluster).simulated_nodes and not writer.data.get("drill"):
        why = f"replaced by a spare in {writer.run}/{writer.attempt}: {writer.data.get('reason', '')}"
        writer.store.saw_node(lost, cluster, epoch=writer.epoch, now=writer.event.time, failure=why)


_HANDLERS: dict[str, Callable[[_EventWriter], None]] = {
    EventKind.ATTEMPT_STARTED: _attempt_started,
    EventKind.GENERATION_STARTED: _generation_started,
    EventKind.GENERATION_FIRST_STEP: _first_step,
    EventKind.GENERATION_ENDED: _generation_ended,
    EventKind.CHECKPOINT_COMMITTED: _record_commit,
    EventKind.CHECKPOINT_RESTORED: _record_restore,
    EventKind.CHECKPOINT_REFUSED: _record_refusal,
    EventKind.CHECKPOINT_DELETED: _record_deletion,
    EventKind.CHECKPOINT_FLUSHED: _record_flush,
    EventKind.CHECKPOINT_SUSPECT: _record_suspicion,
    EventKind.CHECKPOINT_SEEN: _record_program_checkpoint,
    EventKind.CHECKPOINT_SET_ASIDE: _record_set_aside,
    EventKind.CHECKPOINT_VERIFIED: _record_verified,
    EventKind.CODE_CHANGED: _code_changed,
    EventKind.PREFLIGHT: _preflight,
    EventKind.SPARE_USED: _spare_used,
    **dict.fromkeys(
        (
            EventKind.INCIDENT, EventKind.STRAGGLER, EventKind.BATCH_SKIPPED, EventKind.RESTART_DIFFERS,
            EventKind.CHECKPOINT_INCOMPLETE, EventKind.CODE_RECORDED, EventKind.DRILL, EventKind.RESTORE_TESTED,
        ),
        _notice,
    ),
}  # fmt: skip


def _ingest_progress(store: Store, view: ControlledRun, epoch: int, now: float, known: KnownProgress | None) -> bool:
    if known is None:
        return False
    run, attempt = store.run(view.run.name), store.attempt(view.run.name, view.last.number)
    loss = known.loss if known.loss is not None else run.loss
    # A workload's last step is in its configuration.
    total = known.total if view.config.command and known.total else run.total_steps
    # The attempt did not save the checkpoint from which it resumed.
    saved = attempt.saved_step
    if known.saved > max(saved or 0, attempt.resumed_from or 0):
        saved = known.saved
    # Compare by repr, because NaN never equals itself.
    before = (run.step, run.loss, run.total_steps, attempt.last_step, attempt.saved_step)
    if repr(before) == repr((known.step, loss, total, known.step, saved)):
        return False

    def note() -> None:
        store.note_run(run.name, epoch=epoch, now=now, step=known.step, loss=loss, total_steps=total)
        store.note_attempt(run.name, attempt.number, epoch=epoch, last_step=known.step, saved_step=saved)

    store.together(note)
    return True
