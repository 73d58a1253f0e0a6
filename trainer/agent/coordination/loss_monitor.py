"""Incidents of a user's program whose loss has become NaN or infinite: the event, evidence and failure."""

import sys
from pathlib import Path

from checkpointing.storage.durable import dump_line, write_durably
from trainer.agent.attempt_state.attempt_state import RunningAttempt
from trainer.agent.processes import background_tasks
from trainer.agent.watch.bad_losses import BadLosses, LossVerdict
from trainer.protocol.config_sections.watch_config import OBSERVE
from trainer.protocol.events import EventKind
from trainer.protocol.failures.outcome import Failure, FailureKind
from trainer.protocol.logs.log_rotation import read_tail
from trainer.protocol.messages.agents import ProgressReport
from trainer.protocol.secrets.secret_redaction import in_use

_TAIL = 64 * 1024


class LossMonitor:
    """Watches the losses of one generation. A loss that stays unusable is reported once."""

    def __init__(self, state: RunningAttempt) -> None:
        self._state, self._losses, self._reported = state, BadLosses(), False

    def receive(self, report: ProgressReport) -> None:
        self._losses.add_report(report.losses)

    async def check(self) -> Failure | None:
        """Return the failure of a program whose loss is unusable, unless it is only observed."""
        if self._reported or not self._losses.is_suspect():
            return None
        state, name = self._state, f"g{self._state.generation.number:03d}-loss"
        bundle = state.attempt_dir.incident(name)
        try:
            verdict = await background_tasks.run_detached(lambda: self._judge(bundle), state.timeouts.verdict)
        except (OSError, TimeoutError) as error:
            sys.stderr.write(f"orch-agent: cannot judge the program's loss in {bundle}: {error!r}\n")
            return None
        if verdict is None:
            return None
        self._reported = True
        observed, evidence = state.config.watch.action == OBSERVE, str(bundle.relative_to(state.run_dir.path))
        state.events.write(
            EventKind.INCIDENT, name=name, kind=str(FailureKind.NUMERIC), rank=None, node=None, phase="",
            step=verdict.step, reason=verdict.reason, waiting=[], culprits=[], chain="", evidence=evidence,
            detected=0.0, withdrawn=False, **({"observed": True} if observed else {}),
        )  # fmt: skip
        if observed:
            return None
        state.generation.finite_until = verdict.finite_until
        return Failure(kind=FailureKind.NUMERIC, reason=verdict.reason, step=verdict.step, evidence=evidence)

    def _judge(self, bundle: Path) -> LossVerdict | None:
        """Return the verdict, and write its evidence. Raises OSError."""
        verdict = self._losses.judge(self._read_log)
        if verdict is not None:
            bundle.mkdir(mode=0o700, parents=True, exist_ok=True)
            shown = in_use().record(dump_line(verdict.to_json()))
            write_durably(bundle / "verdict.json", shown.encode(errors="backslashreplace"))
        return verdict

    def _read_log(self, rank: int) -> str:
        try:
            return read_tail(self._state.attempt_dir.rank_log(rank), _TAIL).decode(errors="replace")
        except FileNotFoundError:  # the ranks of a launcher share a log
            return ""
