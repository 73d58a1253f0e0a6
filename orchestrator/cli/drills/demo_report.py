"""What happened to a run that was hit: the kill, the recovery and the losses around it, read from its directory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.cli.runs.run_reader import EventFeed, StepLines
from trainer.contract.events import Event, EventKind
from trainer.contract.run_dir import RunDir


@dataclass(frozen=True, kw_only=True)
class DemoReport:
    """The first fault of a run and what came of it; None where it did not happen."""

    fault: str | None
    step: int | None
    resumed_from: int | None
    tier: str  # what it was loaded from: `memory`, or the path of a tier; empty when nothing was
    recovery_s: float | None
    first_loss: float | None
    loss_before: float | None
    loss_after: float | None
    last_loss: float | None
    replayed: int
    replayed_equal: int

    @property
    def recovered(self) -> bool:
        return self.fault is not None and self.recovery_s is not None


def read_demo_report(run_dir: Path) -> DemoReport:
    """Read events and metrics of all attempts."""
    events, steps = EventFeed(run_dir).poll(), StepLines(RunDir(run_dir)).read()
    fault = next((event for event in events if _is_fault(event)), None)
    first = _after(events, fault, EventKind.GENERATION_FIRST_STEP)
    restored = _after(events, fault, EventKind.CHECKPOINT_RESTORED)
    before, after = _around(steps, fault)
    pairs = _replayed(steps)
    return DemoReport(
        fault=_words(fault) if fault else None,
        step=before["step"] if before else None,
        resumed_from=restored.data.get("step") if restored else None,
        tier=str(restored.data.get("tier", "")) if restored else "",
        recovery_s=first.time - fault.time if first and fault else None,
        first_loss=steps[0]["loss"] if steps else None,
        loss_before=before["loss"] if before else None,
        loss_after=after["loss"] if after else None,
        last_loss=steps[-1]["loss"] if steps else None,
        replayed=len(pairs),
        replayed_equal=sum(1 for one, other in pairs if one == other),
    )


def _is_fault(event: Event) -> bool:
    return event.kind == EventKind.DRILL or (event.kind == EventKind.RANK_EXITED and bool(event.data.get("signal")))


def _words(event: Event) -> str:
    data = event.data
    if event.kind == EventKind.DRILL:
        done = {"kill-rank": "killed with SIGKILL", "raise": "made to raise"}.get(data["kind"], data["kind"])
        return f"rank {data['rank']} was {done} after step {data['step']}"
    return f"rank {data['rank']} died of signal {data['signal']}"


def _place(event: Event) -> tuple[int, int]:
    return event.attempt, event.generation


def _after(events: list[Event], fault: Event | None, kind: EventKind) -> Event | None:
    """The first event of this kind in a later generation or attempt than the fault's."""
    if fault is None:
        return None
    return next((event for event in events if event.kind == kind and _place(event) > _place(fault)), None)


def _around(steps: list[dict[str, Any]], fault: Event | None) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The last step trained before the recovery and the first one after it."""
    if fault is None:
        return None, None
    before = [line for line in steps if (line["attempt"], line["generation"]) <= _place(fault)]
    after = [line for line in steps if (line["attempt"], line["generation"]) > _place(fault)]
    return (before[-1] if before else None), (after[0] if after else None)


def _replayed(steps: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Losses of the steps that were trained again: the first time, and the last time."""
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for line in steps:
        if line["step"] in first:
            last[line["step"]] = line["loss"]
        first.setdefault(line["step"], line["loss"])
    return [(first[step], loss) for step, loss in last.items()]
