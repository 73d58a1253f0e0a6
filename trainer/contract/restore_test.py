"""A restore test: what its job is asked to look at, and what it has found."""

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import dump_line, read_json, write_durably
from trainer.contract.config import build
from trainer.contract.run_dir import AttemptDir, RunDir
from trainer.contract.secrets.secret_redaction import in_use

ORDER_SCHEMA = "orch.restore-test/1"
VERDICT_SCHEMA = "orch.restore-verdict/1"
RESTORE_PROGRAM = Path(__file__).parent.parent / "agent" / "user_command" / "restore_program.py"
"""The program that runs a user's own one against a checkpoint; it is started by its path."""
CHECKPOINT_VARIABLE = "ORCH_CHECKPOINT"
"""Tells that program, and the user's, which file or folder the checkpoint is."""


class Outcome(StrEnum):
    """How a restore test ends."""

    RESTORED = "RESTORED"  # it was restored, and trains as it should
    SUSPECT = "SUSPECT"  # it loads, and trains otherwise than its run did, although all else is equal
    CORRUPT = "CORRUPT"  # bytes, structure or values are not what was saved
    NOT_COMPARABLE = "NOT_COMPARABLE"  # something else than the checkpoint is not as it was: code, data, software
    NOT_FINISHED = "NOT_FINISHED"  # nothing is known of the checkpoint


FOUND_BAD = frozenset({Outcome.SUSPECT, Outcome.CORRUPT})
UNDECIDED = frozenset({Outcome.NOT_COMPARABLE, Outcome.NOT_FINISHED})
"""Outcomes that are no verdict on the checkpoint: they change no trust."""


@dataclass(frozen=True, kw_only=True)
class RestoreTest:
    """The checkpoint that a run is to restore instead of training on, and how far it is to go.

    `manifest` is the digest that the registry kept at commit, `config_digest` that of the config it was saved with;
    either is empty when nobody knows. `steps_digest` is that of the config that the run's next steps were trained with.
    `agreed`: an earlier test of the run that was restored with equal steps on this layout, if there is one.
    """

    run: str
    run_dir: str
    place: str  # the folder or URL that holds the checkpoint
    checkpoint: str
    step: int
    layout: str
    same_layout: bool = False  # as the attempt that saved it
    level: int = 4
    steps: int = 3
    manifest: str = ""
    config_digest: str = ""
    steps_digest: str = ""
    agreed: str = ""
    differs: tuple[str, ...] = ()  # identity fields (code.user, env.torch) that are others than the run's

    def last_step(self, train_steps: int) -> int:
        """The step to which the test trains: within the run's, or one more where the run was at its end."""
        return self.step + 1 if self.step >= train_steps else min(self.step + self.steps, train_steps)


@dataclass(frozen=True, kw_only=True)
class RestoreVerdict:
    """What a restore test has found: one reason for people, `evidence` as plain JSON."""

    outcome: Outcome
    reason: str
    evidence: dict[str, Any] = field(default_factory=dict)

    def write(self, attempt: AttemptDir) -> None:
        shown = in_use().record(dump_line({"schema": VERDICT_SCHEMA, **asdict(self)}))
        write_durably(attempt.restore_verdict, shown.encode())

    @classmethod
    def read(cls, attempt: AttemptDir) -> "RestoreVerdict":
        """Raises OSError when there is none, ValueError, TypeError or KeyError for a damaged one."""
        verdict = build(cls, read_json(attempt.restore_verdict))
        assert isinstance(verdict, cls)
        return verdict


def write_order(run: RunDir, order: dict[str, Any]) -> None:
    """Put the order into the folder of the run that is to carry it out; raises OSError."""
    write_durably(run.restore_test, dump_line({"schema": ORDER_SCHEMA, **order}).encode())


def read_order(run: RunDir) -> RestoreTest | None:
    """What this run is to restore; None for a run that trains. Raises OSError or ValueError."""
    try:
        fields = read_json(run.restore_test)
    except FileNotFoundError:
        return None
    order = build(RestoreTest, fields)
    assert isinstance(order, RestoreTest)
    return order
