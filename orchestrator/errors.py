"""The error tree of the login-node side; every class carries its exit code.

OrchError                       1
 +- ConfigError                 2   bad input: a key, a value, a file, an option
 +- NotFound                    3   no such run, attempt, checkpoint or preset
 |   +- RunExpected             3   a checkpoint was given where a run is needed
 +- Precondition                4   something outside must be fixed first
 |   +- TierUnread              4   an unreadable tier may have the newest checkpoint
 +- SlurmUnreachable            5   no answer: the state is unknown, and nothing is assumed
 |   +- SubmitAmbiguous         5   sbatch failed, but the job may exist
 +- SubmitRejected              4   Slurm refused this job
 +- RegistryError               6   locked, damaged, or written by a newer version
 |   +- Fenced                  6   another controller now holds the lease
 |       +- ForeignRun          6   the run belongs to another scheduler
 |       +- SchedulerChanged    6   commands reach a scheduler other than the lease's
 +- CheckpointInvalid           7
 +- RunFailed                   8
 +- RunCancelled               10
 +- WaitTimeout               124
"""

from enum import Enum, auto


class Retryable(Enum):
    """Whether a refused job may be accepted later without changes."""

    NEVER = auto()
    ONCE_ACCEPTED = auto()  # a typo in a new run, but an outage if Slurm accepted the same job before
    YES = auto()


class OrchError(Exception):
    """Base error: what failed, where, why, and the remedy."""

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.hint = what, where, hint


class ConfigError(OrchError):
    exit_code = 2


class NotFound(OrchError):
    exit_code = 3


class RunExpected(NotFound):
    """A checkpoint was given where a run is required. `given` is the checkpoint as typed, and `run` is its run."""

    def __init__(self, given: str, run: str) -> None:
        super().__init__(f"{given} is a checkpoint, but a run is required", hint=f"the run is {run}")
        self.given, self.run = given, run


class Precondition(OrchError):
    exit_code = 4


class TierUnread(Precondition):
    pass


class SlurmUnreachable(OrchError):
    exit_code = 5


class SubmitAmbiguous(SlurmUnreachable):
    pass


class SubmitRejected(OrchError):
    """The scheduler refused a job.

    `retryable` shows whether a later try may be accepted. `unknown_nodes` are nodes that orch avoided but Slurm does
    not know. `change` has overrides that may help, as a user types them.
    """

    exit_code = 4

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        hint: str = "",
        retryable: Retryable = Retryable.NEVER,
        unknown_nodes: tuple[str, ...] = (),
        change: str = "",
    ) -> None:
        super().__init__(what, where=where, hint=hint)
        self.retryable, self.unknown_nodes, self.change = retryable, unknown_nodes, change


class RegistryError(OrchError):
    exit_code = 6


class Fenced(RegistryError):
    pass


class ForeignRun(Fenced):
    pass


class SchedulerChanged(Fenced):
    pass


class CheckpointInvalid(OrchError):
    exit_code = 7


class RunFailed(OrchError):
    exit_code = 8


class RunCancelled(OrchError):
    exit_code = 10


class WaitTimeout(OrchError):
    exit_code = 124
