"""Restore test: the order for its job, and its verdict."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import dump_line, read_json, write_durably
from trainer.protocol.plain_data import build
from trainer.protocol.run_dir import AttemptDir, RunDir
from trainer.protocol.secrets.secret_redaction import in_use

ORDER_SCHEMA = "orch.restore-test/1"
VERDICT_SCHEMA = "orch.restore-verdict/1"
RESTORE_PROGRAM = Path(__file__).parent.parent / "agent" / "user_command" / "restore_program.py"
"""Program, started by its path, that runs the user's program against a checkpoint."""
TRAIN = "--train"
"""First argument of RESTORE_PROGRAM if the run's own command follows."""
CHECKPOINT_VARIABLE = "ORCH_CHECKPOINT"
"""Environment variable with the checkpoint's file or folder, for RESTORE_PROGRAM and the user's program."""


def is_restore_program(command: Sequence[str]) -> bool:
    """Return whether a command is that of a restore test, which need not train to the end."""
    return len(command) > 1 and Path(command[1]).parts[-4:] == RESTORE_PROGRAM.parts[-4:]


def own_command(command: Sequence[str]) -> int:
    """Return where the run's own command begins in that of its restore test, and 0 in any other command."""
    return command.index(TRAIN) + 1 if is_restore_program(command) and TRAIN in command[2:3] else 0


class Outcome(StrEnum):
    """Outcome of a restore test."""

    RESTORED = "RESTORED"  # restored, and trains as expected
    SUSPECT = "SUSPECT"  # loads, but trains differently from its run, although everything else is equal
    CORRUPT = "CORRUPT"  # bytes, structure or values differ from those saved
    NOT_COMPARABLE = "NOT_COMPARABLE"  # something other than the checkpoint has changed: code, data, software
    NOT_FINISHED = "NOT_FINISHED"  # no result about the checkpoint


FOUND_BAD = frozenset({Outcome.SUSPECT, Outcome.CORRUPT})
UNDECIDED = frozenset({Outcome.NOT_COMPARABLE, Outcome.NOT_FINISHED})
"""Outcomes without a verdict on the checkpoint: they do not change its trust."""


@dataclass(frozen=True, kw_only=True)
class RestoreTestOrder:
    """Checkpoint that a run restores instead of training, and the number of steps to train after it.

    `manifest` is the digest that the registry recorded at commit. `config_digest` is the digest of the config that
    saved the checkpoint; `steps_digest` is that of the config that trained the following steps. Unknown digests
    are empty. `agreed` is an earlier restore test on this layout whose steps were identical to the run's, if any.
    """

    run: str
    run_dir: str
    place: str  # folder or URL of the checkpoint
    checkpoint: str
    step: int
    layout: str
    same_layout: bool = False  # same layout as the attempt that saved it
    level: int = 4
    steps: int = 3
    manifest: str = ""
    config_digest: str = ""
    steps_digest: str = ""
    agreed: str = ""
    differs: tuple[str, ...] = ()  # identity fields (code.user, env.torch) that differ from the run's

    def last_step(self, train_steps: int) -> int:
        """Return the last step to train. It exceeds the run's last step only if the checkpoint is from that step."""
        return self.step + 1 if self.step >= train_steps else min(self.step + self.steps, train_steps)


@dataclass(frozen=True, kw_only=True)
class RestoreVerdict:
    """Verdict of a restore test. `reason` is a sentence for users, `evidence` is plain JSON."""

    outcome: Outcome
    reason: str
    evidence: dict[str, Any] = field(default_factory=dict)

    def write(self, attempt: AttemptDir) -> None:
        shown = in_use().record(dump_line({"schema": VERDICT_SCHEMA, **asdict(self)}))
        write_durably(attempt.restore_verdict, shown.encode())

    @classmethod
    def read(cls, attempt: AttemptDir) -> "RestoreVerdict":
        """Parse the verdict. Raises OSError if it is missing; ValueError, TypeError or KeyError if it is damaged."""
        return build(cls, read_json(attempt.restore_verdict))


def write_order(run: RunDir, order: dict[str, Any]) -> None:
    """Write the order into the folder of the run that executes it. Raises OSError."""
    write_durably(run.restore_test, dump_line({"schema": ORDER_SCHEMA, **order}).encode())


def read_order(run: RunDir) -> RestoreTestOrder | None:
    """Return the run's restore-test order, or None for a run that trains. Raises OSError or ValueError."""
    try:
        return build(RestoreTestOrder, read_json(run.restore_test))
    except FileNotFoundError:
        return None
