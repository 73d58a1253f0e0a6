"""Plant one-line bugs, one at a time, and count how many the fast tests of the same folder catch.

    python -m tests.mutants [--seed N] [--count N] [--only AREA ...] [--jobs N] [--cache FILE]

Fast tests are neither marked `proof` nor need Slurm. Each mutant is planted in a copy of the tree. Its tests are those
that ran its line in a recorded run, the shortest first. Exit code 1 if fewer than 90 % are caught.
"""

import argparse
import importlib
import os
import random
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.mutants.areas import AREAS, ROOT, sources
from tests.mutants.mutations import Mutant, mutants
from tests.mutants.tested_lines import TestRun, tests_by_line
from tests.mutants.trials import Slot, Trial, tests_of

ENOUGH = 0.9
_IMPORTED = (
    "torch", "torch.distributed.checkpoint", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp",
    "torch.distributed.pipelining", "torch.distributed.tensor.parallel", "fsspec", "hypothesis", "omegaconf", "psutil",
    "sqlalchemy", "xdist.scheduler",
)  # fmt: skip
"""Modules that forked tests need not import again; no tensor may exist before the fork, which loses its threads."""


def chosen(areas: Sequence[str], count: int, seed: int) -> list[tuple[str, Mutant]]:
    """Return equally many mutants of each area, at most one per line."""
    found = []
    for number, area in enumerate(areas):
        by_line = defaultdict(list)
        for source in sources(area):
            for one in mutants(source, (ROOT / source).read_text()):
                by_line[one.file, one.line].append(one)
        rng = random.Random(f"{seed} {area}")
        share = count // len(areas) + (number < count % len(areas))
        lines = rng.sample(sorted(by_line), min(share, len(by_line)))
        found += [(area, rng.choice(by_line[line])) for line in lines]
    random.Random(seed).shuffle(found)  # a run that is cut short has seen all areas
    return found


def tried(todo: Iterable[Mutant], jobs: int, cache: Path, areas: Sequence[str]) -> Iterable[Trial]:
    """Try each mutant in one of `jobs` slots."""
    slots = [Slot() for _ in range(jobs)]  # copies of the tree as it is now, which may be edited meanwhile
    try:
        tests = dict(tests_by_line(cache, areas))
        if failed := [name for name, test in tests.items() if not test.passed]:
            say(f"{len(failed)} tests failed without a mutant and are left out: {', '.join(failed[:10])}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in _IMPORTED:
                importlib.import_module(name)
        broken = slots[0].broken(sorted({name.partition("::")[0] for name in tests}))
        if broken:
            say(f"cannot be imported, and are left out: {', '.join(sorted(broken))}")
        tests = {name: test for name, test in tests.items() if name.partition("::")[0] not in broken}
        waiting = sorted(todo, key=lambda one: _cost(one, tests))
        while waiting or not all(slot.is_free for slot in slots):
            for slot in slots:
                if slot.is_free and waiting:
                    slot.begin(waiting.pop(0), tests)
                if not slot.is_free and (trial := slot.poll()):
                    yield trial
            time.sleep(0.02)
    finally:
        for slot in slots:
            slot.close()


def _cost(mutant: Mutant, tests: Mapping[str, TestRun]) -> tuple[bool, float]:
    """Return the sort key: mutants without real ranks and with short tests first."""
    own = [tests[name] for name in tests_of(mutant, tests)]
    return any(test.ranks for test in own), sum(test.seconds for test in own)


def line(trial: Trial) -> str:
    """Return a row of the table."""
    caught = trial.caught_by or ("NOT CAUGHT" if trial.tests else "NOT CAUGHT: no test runs the line")
    return f"{trial.seconds:6.1f} s  {trial.mutant.name}  <-  {caught[:150]}"


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="which mutants (default: any)")
    parser.add_argument("--count", type=int, default=100, help="how many")
    parser.add_argument("--only", nargs="+", choices=AREAS, default=list(AREAS), metavar="AREA", help=", ".join(AREAS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at a time")
    parser.add_argument("--cache", type=Path, default=ROOT / "build/tested-lines.json", help="of the recorded run")
    given = parser.parse_args()
    say(f"seed {given.seed}")
    todo = chosen(given.only, given.count, given.seed)
    area_of = {mutant: area for area, mutant in todo}
    counts: dict[str, list[bool]] = {area: [] for area in given.only}
    for trial in tried(area_of, given.jobs, given.cache, given.only):
        counts[area_of[trial.mutant]].append(bool(trial.caught_by))
        say(line(trial))
    for area, caught in counts.items():
        say(f"{area:12} {sum(caught):4} of {len(caught):4} caught")
    every = [one for caught in counts.values() for one in caught]
    say(f"{'all':12} {sum(every):4} of {len(every):4} caught: {sum(every) / max(1, len(every)):.0%}")
    return int(sum(every) < ENOUGH * len(every))


if __name__ == "__main__":
    sys.exit(main())
