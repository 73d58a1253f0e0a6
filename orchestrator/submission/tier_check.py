"""Check before a submit that this machine can use the tiers: a controller must read them at every launch."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from checkpointing.config import RUN
from checkpointing.tiers.tier import HINT
from orchestrator.config.run_config import RunConfig
from orchestrator.errors import Precondition
from orchestrator.submission.bounded_child import BoundedChild, ChildAnswer
from orchestrator.submission.inspect_workload import job_environment

ANSWER_WITHIN = 30.0
"""Seconds for all tiers together."""
_MODULE = "checkpointing.tiers.tier"

Finish = Callable[[Callable[[str], None]], None]


@contextmanager
def checking_tiers(config: RunConfig, environ: Mapping[str, str]) -> Iterator[Finish]:
    """Try the tiers in a child process, which ends with this block.

    The yielded function waits for the answer, and raises Precondition for an unusable tier.
    """
    urls = [tier.path for tier in config.checkpoint.tiers if "://" in tier.path]
    _check_folders(config)
    if not urls or config.command:
        yield lambda note: None
        return
    what = f"waiting for {' and '.join(urls)}, to see whether checkpoints can be written there"
    with BoundedChild(_MODULE, {"tiers": urls}, job_environment(config, environ), what) as child:
        yield lambda note: _judge(child.answer(ANSWER_WITHIN, note))


def _judge(answer: ChildAnswer) -> None:
    tier = str(answer.found.get("trying", "its first tier"))
    if refused := answer.found.get("refused"):
        tier, reason, hint = refused
        raise _unusable(tier, reason, hint)
    if not answer.ended:
        late = f"it does not answer within {ANSWER_WITHIN:.0f} s"
        raise _unusable(tier, answer.died or late, HINT)


def _check_folders(config: RunConfig) -> None:
    """Raise Precondition for a shared folder that cannot be made. Folders of nodes may exist on the nodes only."""
    for tier in config.checkpoint.tiers:
        if tier.path == RUN or "://" in tier.path or not tier.shared or config.command:
            continue
        folder = Path(tier.path).expanduser()
        if not folder.is_absolute():  # below the run's folder, which is yet to be made
            continue
        there = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
        if not there.is_dir():
            raise _unusable(tier.path, f"{there} is not a folder", "name a folder, or leave the tier out")
        if not os.access(there, os.W_OK | os.X_OK, effective_ids=True):
            raise _unusable(
                tier.path, f"nothing can be written in {there}", "name a folder of yours, or `shared: false`"
            )


def _unusable(tier: str, reason: str, hint: str) -> Precondition:
    return Precondition(f"checkpoint.tiers: {tier} cannot be used: {reason}", where="nothing was submitted", hint=hint)
