"""The one small collective of a repeated save: is the plan still everybody's, and is there room on every rank?"""

from dataclasses import dataclass

from checkpointing.engine.ranks.group import RankGroup

_NEVER = -1


@dataclass(frozen=True, kw_only=True)
class SaveReadiness:
    """What one rank knows when a save begins; `plan` is the number of its plan, 0 when its state has another form.

    `rank_state` is a number that stands for the facts which may differ between ranks.
    """

    plan: int
    step: int
    has_room: bool
    idle: bool
    committed: int | None
    rank_state: int = 0


@dataclass(frozen=True, kw_only=True)
class SaveAgreement:
    """The same on every rank: `same` when all can use the plan that they have, `alike` when all have one rank state."""

    same: bool
    has_room: bool
    idle: bool
    committed: int | None
    alike: bool = True


def agree_on_save(ranks: RankGroup, mine: SaveReadiness) -> SaveAgreement:
    """Exchange 72 bytes for each rank; raises ValueError on every rank when they are not at the same step."""
    committed = _NEVER if mine.committed is None else mine.committed
    alike = (mine.rank_state, -mine.rank_state)
    least = ranks.minimum([mine.plan, -mine.plan, mine.step, -mine.step, mine.has_room, mine.idle, committed, *alike])
    plan, most_plan, step, most_step, has_room, idle, committed, state, most_state = least
    if step != -most_step:
        raise ValueError(f"the ranks save different steps, from {step} to {-most_step}: they must call save together")
    return SaveAgreement(
        same=plan == -most_plan != 0,
        has_room=bool(has_room),
        idle=bool(idle),
        committed=None if committed == _NEVER else committed,
        alike=state == -most_state,
    )
