"""PURE: whether a config's layout fits its ranks, asked by submit before anything is written, and by the ranks."""

import math
from dataclasses import dataclass

from trainer.contract.config import JobConfig
from trainer.contract.layout.fixes import MayChange, fixes, typed, workable_tp
from trainer.contract.layout.pipeline_fixes import Fix
from trainer.contract.layout.problems import Problem, batch_problems, problems

SHOWN = 3
"""Problems that a message spells out; the keys to type mend all of them."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why ranks could not be started, and ways to make the config fit, each of which is enough alone."""

    what: str
    fixes: tuple[Fix, ...]

    @property
    def hint(self) -> str:
        """What to type; empty where no other sizes are known to fit."""
        return f"type {', or '.join(map(typed, self.fixes))}" if self.fixes else ""

    def __str__(self) -> str:
        return f"{self.what}: {self.hint}" if self.fixes else self.what


def refusal(config: JobConfig, may_change: MayChange = lambda key: True) -> Refusal | None:
    """None for a config whose ranks can share model, batch and sequence; only keys that `may_change` are offered."""
    found = problems(config)
    if not found:
        return None
    of_tp = any(problem.of_tp for problem in found)
    ways = fixes(config, may_change, second=of_tp)
    found += [problem for problem in _then(config, ways) if problem not in found]
    words = [problem.what for problem in found[:SHOWN]]
    if len(found) > SHOWN:
        words.append(f"and {len(found) - SHOWN} more")
    if of_tp and (sizes := workable_tp(config)):
        words.append(f"parallel.tp may be {_one_of(sizes)}")
    return Refusal(what="; ".join(words), fixes=tuple(ways))


def _then(config: JobConfig, ways: list[Fix]) -> list[Problem]:
    """What of the batch does not fit the data-parallel ranks that the first way leads to."""
    if config.command or not ways or "cluster.nodes" in ways[0]:
        return []
    sizes = (ways[0].get(f"parallel.{name}", getattr(config.parallel, name)) for name in ("cp", "tp"))
    pipeline = config.parallel.pipeline
    stages = ways[0].get("parallel.pipeline.stages", pipeline.stages)
    ranks = config.cluster.world_size // (1 if stages == 1 else stages // pipeline.per_rank)
    return batch_problems(config.train, ranks // math.prod(sizes))


def _one_of(sizes: list[int]) -> str:
    *others, last = map(str, sizes)
    return f"{', '.join(others)} or {last}" if others else last
