"""What a notification says: one sentence, and the same as fields for programs."""

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from orchestrator.registry.records import Run, Transition
from orchestrator.states import RunState

SCHEMA = "orch.notification/1"
_LOOK = {
    RunState.HELD: "look: `orch show {run}`; go on: `orch resume {run}`",
    RunState.FAILED: "look: `orch logs {run} --rank first-error`; mended: `orch resume {run}`",
}


@dataclass(frozen=True, kw_only=True)
class Message:
    """One change of a run's state, as people and programs are told of it; `id` is the same if it is sent again."""

    id: str
    text: str
    run: str
    state: str
    before: str
    reason: str
    time: str  # UTC, ISO 8601
    step: int
    total_steps: int
    loss: float | None
    tags: tuple[str, ...]
    run_dir: str

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    def variables(self) -> dict[str, str]:
        """The fields as variables of an environment: `ORCH_STATE` and so on."""
        fields = {**asdict(self), "tags": ",".join(self.tags), "loss": "" if self.loss is None else repr(self.loss)}
        names = {"id": "ORCH_NOTIFICATION_ID", "time": "ORCH_CHANGED_AT"}
        return {names.get(name, f"ORCH_{name.upper()}"): str(value).replace("\0", "") for name, value in fields.items()}


def message(run: Run, change: Transition) -> Message:
    """What is said of this change; step and loss are those of now."""
    moment = datetime.fromtimestamp(change.time, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
    return Message(
        id=f"{run.name}/{change.after}/{moment}",
        text=_sentence(run, change),
        run=run.name,
        state=change.after,
        before=change.before,
        reason=change.reason,
        time=moment,
        step=run.step,
        total_steps=run.total_steps,
        loss=run.loss,
        tags=run.tags,
        run_dir=run.run_dir,
    )


def _sentence(run: Run, change: Transition) -> str:
    place = f" at step {run.step} of {run.total_steps}" if run.total_steps else ""
    why = f": {change.reason}" if change.reason else ""
    look = _LOOK.get(RunState(change.after), "look: `orch show {run}`").format(run=run.name)
    return f"{run.name} is {change.after}{place}{why} ({look})"
