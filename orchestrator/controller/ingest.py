"""Run directories into the registry: events from where the last tick stopped reading, and the newest progress."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import number, open_regular
from orchestrator.controller.collect import Heartbeat
from orchestrator.controller.event_files import (
    Fresh,
    Paths,
    event_files,
    first_node,
    places_of,
    read_fresh,
    tiers_named,
)
from orchestrator.controller.run_files import DirectFiles, Files
from orchestrator.controller.view import RunView
from orchestrator.recovery.nodes import DRILLED, TAKEN_FOR
from orchestrator.registry.records import Attempt, Checkpoint, Copy, Generation, Notice
from orchestrator.registry.store import Store
from orchestrator.states import Trust, may_move
from trainer.contract.events import Event, EventKind
from trainer.contract.outcome import Failure, FailureKind
from trainer.contract.run_dir import AttemptDir

MEMORY = "memory"
"""The tier of what a restart in place has loaded from the memory that outlived its ranks."""

METRICS_TAIL = 16 * 1024
"""Bytes of the metrics file that are sure to hold one whole line."""


def ingest(store: Store, view: RunView, *, epoch: int, now: float, files: Files | None = None) -> bool:
    """Take in what the newest attempt has written since the last time; whether there was anything new.

    Raises RunDirHangs.
    """
    files, place = files or DirectFiles(), view.place
    names = files.call(view.folder.path, lambda: event_files(place))
    cursors = {path: store.cursor(view.run.name, str(path.relative_to(view.folder.path))) for path in names}
    # Each file is read on its own: one tick late is no harm, a torn order between files is none either.
    fresh = files.call(view.folder.path, lambda: [one for path in names if (one := read_fresh(view, path, cursors))])
    if fresh:
        tiers = tiers_named(store, view, fresh)
        node = next(iter(store.attempt(view.run.name, view.last.number).nodes), None) or first_node(fresh)
        paths = files.call(view.folder.path, lambda: places_of(view, node, tiers))
        for one in fresh:
            _take(store, view, one, paths, epoch, now)
    step, loss = files.call(view.folder.path, lambda: progress(place))
    return _ingest_progress(store, view, epoch, now, step, loss) or bool(fresh)


def _take(store: Store, view: RunView, fresh: Fresh, paths: Paths, epoch: int, now: float) -> None:
    def take() -> None:
        # Rows and cursor in one transaction: an event counts once, whenever the controller dies.
        for event in fresh.events:
            handler = _HANDLERS.get(event.kind)
            if handler is not None:
                handler(_Scribe(store, view, event, epoch, now, paths))
        store.set_cursor(view.run.name, fresh.name, fresh.end, epoch=epoch)

    store.together(take)


class _Scribe:
    """Writes one event into the registry."""

    def __init__(
        self, store: Store, view: RunView, event: Event, epoch: int, now: float, paths: Paths
    ) -> None:  # fmt: skip
        self.store, self.view, self.event, self.epoch, self.now, self.paths = store, view, event, epoch, now, paths
        self.run, self.attempt = view.run.name, view.last.number

    @property
    def data(self) -> dict[str, Any]:
        return self.event.data

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
        """Whether the configuration orders a fault in the event's generation."""
        place = (self.attempt, self.event.generation)
        faults = ((each.attempt, each.generation) for each in self.view.config.drill.events)
        return any(all(wanted in (0, number) for wanted, number in zip(fault, place, strict=True)) for fault in faults)

    def blamed(self, node: str) -> str:
        """The kind of failure for which this node was replaced; of older events, the one that its generation tells."""
        if (kind := str(self.data.get("kind"))) in frozenset(FailureKind):
            return kind
        ended = [g for g in self.store.generations(self.run, self.attempt) if g.number == self.event.generation]
        failure = ended[0].failure if ended else None
        return str(failure["kind"]) if failure and node in Failure.from_json(failure).nodes else FailureKind.AGENT_LOST

    def known(self) -> Checkpoint | None:
        """The row of the checkpoint that the event names."""
        rows = {item.name: item for item in self.store.checkpoints(self.run)}
        return rows.get(self.data["name"])

    def trust(self, to: Trust, reason: str) -> None:
        """Change the trust of the checkpoint that the event names, where the table allows it."""
        self.doubt(self.known(), to, reason)

    def doubt(self, item: Checkpoint | None, to: Trust, reason: str) -> None:
        if item is not None and item.trust != to and may_move(item.trust, to):
            self.store.trust(self.run, item.name, to, reason, epoch=self.epoch, now=self.now)

    def elsewhere(self) -> str:
        """The tier of the event when it is not the one in which the checkpoint was committed; empty when it is."""
        tier, item = str(self.data.get("tier") or ""), self.known()
        home = "" if item is None else item.tier or str(self.view.folder.checkpoints)
        return tier if tier and not self.paths.same(tier, home) else ""

    def leave_home(self, trust: Trust, reason: str) -> None:
        """The checkpoint is no longer good where it was committed: a copy takes its place, else its trust changes."""
        item, name = self.known(), self.data["name"]
        copies = [copy for copy in self.store.copies(self.run) if copy.name == name]
        if item is None or item.trust is Trust.DELETED or not copies:
            self.doubt(item, trust, reason)
            return
        own = str(self.view.folder.checkpoints)
        chosen = min(copies, key=lambda copy: (not self.paths.same(copy.tier, own), copy.copied_at))
        self.store.rehome(chosen, f"{reason}; there is a copy in {chosen.tier}", epoch=self.epoch)


def _attempt_started(scribe: _Scribe) -> None:
    nodes = tuple(scribe.data.get("nodes", ()))
    scribe.note(started_at=scribe.event.time, nodes=nodes)
    for node in nodes:
        scribe.store.saw_node(node, scribe.view.run.domain, epoch=scribe.epoch, now=scribe.now)


def _generation_started(scribe: _Scribe) -> None:
    scribe.generation(started_at=scribe.event.time)
    scribe.note(generations=max(scribe.row().generations, scribe.event.generation))


def _first_step(scribe: _Scribe) -> None:
    if scribe.row().first_step is None:
        scribe.note(first_step=scribe.data.get("step"))


def _generation_ended(scribe: _Scribe) -> None:
    step = scribe.data.get("step")
    scribe.generation(
        ended_at=scribe.event.time,
        last_step=step,
        reason=scribe.data.get("reason", ""),
        failure=scribe.data.get("failure"),
    )


def _committed(scribe: _Scribe) -> None:
    step, name, tier = scribe.data["step"], scribe.data["name"], scribe.paths.first_tier
    checkpoint = Checkpoint(
        run=scribe.run,
        name=name,
        step=step,
        attempt=scribe.attempt,
        trust=Trust.COMMITTED,
        bytes=scribe.data.get("bytes", 0),
        path=f"{tier or scribe.view.folder.checkpoints}/{name}",
        committed_at=scribe.event.time,
        tier=tier,
        seconds=scribe.data.get("seconds"),
        stall=scribe.data.get("stall"),
    )
    scribe.store.put_checkpoint(checkpoint, epoch=scribe.epoch)
    scribe.note(saved_step=max(step, scribe.row().saved_step or 0))


def _flushed(scribe: _Scribe) -> None:
    tier, name = scribe.data["tier"], scribe.data["name"]
    copy = Copy(
        run=scribe.run,
        name=name,
        tier=tier,
        path=f"{tier}/{name}",
        bytes=scribe.data.get("bytes", 0),
        copied_at=scribe.event.time,
    )
    if scribe.known() is not None:
        scribe.store.put_copy(copy, epoch=scribe.epoch)


def _suspect(scribe: _Scribe) -> None:
    """The coordinator's word; ranks only say what they left out because of it."""
    if scribe.event.source.startswith("rank-"):
        return
    for item in scribe.store.checkpoints(scribe.run):
        # One of the same step that was saved later is another state.
        if item.step == scribe.data["step"] and item.committed_at <= scribe.event.time:
            scribe.doubt(item, Trust.SUSPECT, str(scribe.data.get("reason", "suspect")))


def _seen(scribe: _Scribe) -> None:
    """One that a user's own program wrote: nobody can verify it, and its trust stays at that."""
    step, path = scribe.data["step"], str(scribe.data["path"])
    new, known = bool(scribe.data.get("new")), scribe.known() is not None
    # What is there when an attempt begins, and nobody has told of, was written when the one before it ended.
    writer = scribe.attempt if new or known else max(1, scribe.attempt - 1)
    checkpoint = Checkpoint(
        run=scribe.run, name=scribe.data["name"], step=step, attempt=writer, trust=Trust.COMMITTED,
        bytes=scribe.data.get("bytes", 0), path=path, committed_at=scribe.event.time, tier=os.path.dirname(path),
    )  # fmt: skip
    scribe.store.put_checkpoint(checkpoint, epoch=scribe.epoch)
    if new or (writer < scribe.attempt and not known):
        before = scribe.store.attempt(scribe.run, writer).saved_step
        scribe.store.note_attempt(scribe.run, writer, epoch=scribe.epoch, saved_step=max(step, before or 0))


def _set_aside(scribe: _Scribe) -> None:
    if scribe.known() is None:  # a damaged one is told of by nobody before
        path = str(scribe.data["path"])
        checkpoint = Checkpoint(
            run=scribe.run, name=scribe.data["name"], step=scribe.data["step"], attempt=max(1, scribe.attempt - 1),
            trust=Trust.COMMITTED, bytes=0, path=path, committed_at=scribe.event.time, tier=os.path.dirname(path),
        )  # fmt: skip
        scribe.store.put_checkpoint(checkpoint, epoch=scribe.epoch)
    told = f"set aside as {scribe.data['path']}: {scribe.data.get('reason', '')}"
    scribe.trust(Trust.CORRUPT if scribe.data.get("damaged") else Trust.SUSPECT, told)


def _restored(scribe: _Scribe) -> None:
    step = scribe.data["step"]
    scribe.generation(resumed_from=step, tier=str(scribe.data.get("tier") or ""))
    if scribe.row().resumed_from is None:
        scribe.note(resumed_from=step)
    if scribe.data.get("tier") == MEMORY:
        return  # its bytes on the disk were not looked at
    scribe.trust(Trust.RESTORED, f"attempt {scribe.attempt} resumed from it")


def _refused(scribe: _Scribe) -> None:
    reason, tier = str(scribe.data.get("reason", "refused")), scribe.elsewhere()
    if tier == MEMORY or scribe.data.get("damaged") is False:
        return  # nothing is wrong with its bytes on the disk, as far as anybody knows
    if tier:
        scribe.store.drop_copy(scribe.run, scribe.data["name"], tier, epoch=scribe.epoch)
        return
    scribe.leave_home(Trust.CORRUPT, f"attempt {scribe.attempt} refused it: {reason}")


def _deleted(scribe: _Scribe) -> None:
    tier = scribe.elsewhere()
    if tier:
        scribe.store.drop_copy(scribe.run, scribe.data["name"], tier, epoch=scribe.epoch)
        return
    scribe.leave_home(Trust.DELETED, f"deleted by attempt {scribe.attempt}: newer ones are kept")


def _notice(scribe: _Scribe, node: str | None = None, **more: Any) -> None:
    """Kept for people and for the judgement of nodes, with what that needs to know besides."""
    event = scribe.event
    if node is None:
        node = str(scribe.data.get("node") or "")
    # Ranks count their events anew in every generation.
    source = f"{event.source}/{event.generation}" if event.source.startswith("rank-") else event.source
    drilled = {DRILLED: True} if scribe.is_drilled() else {}
    notice = Notice(
        run=scribe.run, attempt=scribe.attempt, source=source, seq=event.seq, kind=str(event.kind),
        generation=event.generation, time=event.time, node=node, data={**scribe.data, **drilled, **more},
    )  # fmt: skip
    scribe.store.put_notice(notice, epoch=scribe.epoch)


def _examined(scribe: _Scribe) -> None:
    """By the node's name: its agent's place in the job means nothing elsewhere."""
    if not scribe.data["ok"]:
        _notice(scribe, str(scribe.data.get("name") or ""))


def _spare_used(scribe: _Scribe) -> None:
    """The attempt goes on, and no failure of it will tell of the node that was lost."""
    lost, cluster = str(scribe.data["instead"]), scribe.view.run.domain
    _notice(scribe, lost, **{TAKEN_FOR: scribe.blamed(lost)})
    if lost and cluster != "local":
        why = f"replaced by a spare in {scribe.run}/{scribe.attempt}: {scribe.data.get('reason', '')}"
        scribe.store.saw_node(lost, cluster, epoch=scribe.epoch, now=scribe.event.time, failure=why)


_HANDLERS: dict[str, Callable[[_Scribe], None]] = {
    EventKind.ATTEMPT_STARTED: _attempt_started,
    EventKind.GENERATION_STARTED: _generation_started,
    EventKind.GENERATION_FIRST_STEP: _first_step,
    EventKind.GENERATION_ENDED: _generation_ended,
    EventKind.CHECKPOINT_COMMITTED: _committed,
    EventKind.CHECKPOINT_RESTORED: _restored,
    EventKind.CHECKPOINT_REFUSED: _refused,
    EventKind.CHECKPOINT_DELETED: _deleted,
    EventKind.CHECKPOINT_FLUSHED: _flushed,
    EventKind.CHECKPOINT_SUSPECT: _suspect,
    EventKind.CHECKPOINT_SEEN: _seen,
    EventKind.CHECKPOINT_SET_ASIDE: _set_aside,
    EventKind.INCIDENT: _notice,
    EventKind.STRAGGLER: _notice,
    EventKind.BATCH_SKIPPED: _notice,
    EventKind.DRILL: _notice,
    EventKind.PREFLIGHT: _examined,
    EventKind.SPARE_USED: _spare_used,
}


def _ingest_progress(
    store: Store, view: RunView, epoch: int, now: float, step: int | None, loss: float | None
) -> bool:  # fmt: skip
    if step is None:
        return False
    run, attempt = store.run(view.run.name), store.attempt(view.run.name, view.last.number)
    # By repr: a NaN is never equal to itself.
    if repr((run.step, run.loss, attempt.last_step)) == repr((step, loss if loss is not None else run.loss, step)):
        return False

    def note() -> None:
        store.note_run(run.name, epoch=epoch, now=now, step=step, loss=loss if loss is not None else run.loss)
        store.note_attempt(run.name, attempt.number, epoch=epoch, last_step=step)

    store.together(note)
    return True


def progress(place: AttemptDir) -> tuple[int | None, float | None]:
    """Newest trained step and its loss, from the metrics' last line, else from the heartbeat."""
    line = last_line(place.metrics)
    if line is not None and line.get("step") is not None:
        return line["step"], number(line["loss"]) if line.get("loss") is not None else None
    try:
        beat = Heartbeat.read(place.heartbeat)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None, None
    # Step 0 says that no rank has told its step yet, not that the run is back at its beginning.
    return (beat.step, beat.loss) if beat.step else (None, None)


def last_line(path: Path) -> dict[str, Any] | None:
    """The last whole line of a file of JSON lines; None when there is none."""
    try:
        with open_regular(path) as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - METRICS_TAIL))
            block = stream.read(METRICS_TAIL)
        lines = block[: block.rfind(b"\n") + 1].splitlines()
        found = json.loads(lines[-1]) if lines else None
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
