"""The error tree of the login-node side; every class carries its exit code.

OrchError                       1
 +- ConfigError                 2   bad input: a key, a value, a file, an option
 +- NotFound                    3   no such run, attempt, checkpoint or preset
 |   +- RunExpected             3   a checkpoint is named where a run is needed
 +- Precondition                4   something outside must be mended first
 |   +- TierUnread              4   a tier that may have the newest checkpoint cannot be read
 +- SlurmUnreachable            5   no answer: the state is unknown and nothing was assumed
 |   +- SubmitAmbiguous         5   sbatch failed, and the job may exist all the same
 +- SubmitRejected              4   Slurm answered that it will not take this job
 +- RegistryError               6   locked, damaged, or of a newer version
 |   +- Fenced                  6   another controller holds the lease by now
 |       +- ForeignRun          6   the run belongs to another scheduler
 |       +- SchedulerChanged    6   commands reach another scheduler than the one the lease is for
 +- CheckpointInvalid           7
 +- RunFailed                   8
 +- RunCancelled               10
 +- WaitTimeout               124
"""

from enum import Enum, auto


class Retryable(Enum):
    """Whether a refused job may be taken later although nobody changes it."""

    NEVER = auto()
    ONCE_ACCEPTED = auto()  # a typo in a new run; an outage where Slurm has taken the same job before
    YES = auto()


class OrchError(Exception):
    """What went wrong, where it is, why, and what to type."""

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.hint = what, where, hint


class ConfigError(OrchError):
    exit_code = 2


class NotFound(OrchError):
    exit_code = 3


class RunExpected(NotFound):
    """`given`: the checkpoint that was named, as it was typed; `run`: its run."""

    def __init__(self, given: str, run: str) -> None:
        super().__init__(f"{given} is a checkpoint, and a run is needed", hint=f"the run is {run}")
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
    """`retryable`: whether a later try may be taken; `unknown_nodes`: nodes orch avoided that Slurm does not know;
    `change`: keys with other values that may cure it, as people type them.
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
