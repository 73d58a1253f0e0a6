"""Healthy runs that a rule about the looks of a run would call damaged."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.trainer.conftest import Run, merged, ranks_of_node
from tests.trainer.worker.restore_test.conftest import Subject
from tests.trainer.worker.restore_test.damages import read_all, save_anew
from tests.trainer.worker.unusual_state import targets
from trainer.protocol import skipped_batches
from trainer.protocol.config import hash_config
from trainer.protocol.launch_token import LaunchToken
from trainer.protocol.restore_test import Outcome, RestoreVerdict
from trainer.protocol.skipped_batches import Skip

STEPS, EVERY, TESTED = 10, 3, 6
RESTORED, NOT_COMPARABLE = frozenset({Outcome.RESTORED}), frozenset({Outcome.NOT_COMPARABLE})
EITHER = RESTORED | NOT_COMPARABLE
EXPERTS = {"model": {"experts": {"count": 4, "per_token": 2}}, "train": {"dtype": "bfloat16"}}
Make = Callable[..., Run]
Test = Callable[[Subject, Path], RestoreVerdict]


@dataclass(frozen=True, kw_only=True)
class Kind:
    name: str
    over: Mapping[str, Any] = field(default_factory=dict)
    world: int = 1
    train: Callable[[Make, "Kind", int], Run] | None = None
    test: Test | None = None
    outcomes: frozenset[Outcome] = RESTORED

    def run(self, make: Make, seed: int) -> Run:
        made = self.train(make, self, seed) if self.train else new(make, self, seed)
        assert made.train()["codes"] == [0] * made.world, made.log()
        return made

    def verdict(self, subject: Subject, place: Path) -> RestoreVerdict:
        if self.test is not None:
            return self.test(subject, place)
        return subject.verdict(newest(subject), world=self.world, parallel=dict(self.over.get("parallel", {})))


def newest(subject: Subject) -> Path:
    """Return the newest checkpoint up to TESTED: short steps skip a save while another one is being written."""
    folders = sorted(subject.source.dir.checkpoints.glob("step-*"))
    return [folder for folder in folders if int(folder.name[5:13]) <= TESTED][-1]


def new(make: Make, kind: Kind, seed: int, **more: Any) -> Run:
    settings = {"train": {"steps": STEPS, "seed": seed + 1}, "checkpoint": {"every": EVERY, "keep": 9}}
    return make(kind.world, **merged(merged(dict(kind.over), settings), more))


# -- what happens to a run while it trains


def skipping(make: Make, kind: Kind, seed: int) -> Run:
    run = new(make, kind, seed)
    skipped_batches.add(run.attempt, [Skip(step=2, position=8 * (1 + seed % 5), reason="a spike")])
    return run


def from_one_that_skipped(make: Make, kind: Kind, seed: int) -> Run:
    """`--from`: the new run's data position does not follow from its step, because its parent skipped a batch."""
    parent = skipping(make, kind, seed)
    assert parent.train()["codes"] == [0] * parent.world, parent.log()
    (folder,) = parent.dir.checkpoints.glob(f"step-{EVERY:08d}.*")
    child = new(make, kind, seed)
    shutil.copytree(folder, child.dir.checkpoints / folder.name)
    token = LaunchToken(attempt=1, epoch=1, job_id="1", nonce="4567cdef", checkpoints=(folder.name,))
    token.write(child.attempt.go)
    return child


def resumed_elsewhere(make: Make, kind: Kind, seed: int) -> Run:
    first = new(make, kind, seed, train={"steps": TESTED})
    assert first.train()["codes"] == [0] * first.world, first.log()
    run = Run(ranks=first.ranks, dir=first.dir, world=3 - first.world, attempt_number=2)
    run.attempt.make()
    config = json.loads(run.dir.config.read_text())
    config["train"]["steps"] = STEPS
    run.dir.config.write_text(json.dumps(config))
    run.attempt.config.write_text(json.dumps(elsewhere(config, run.world)))
    names = tuple(path.name for path in run.dir.checkpoints.iterdir())
    LaunchToken(attempt=2, epoch=2, job_id="2", nonce="89ab0123", checkpoints=names).write(run.attempt.go)
    return run


def elsewhere(config: dict[str, Any], world: int) -> dict[str, Any]:
    changed = {"cluster": {**config["cluster"], **ranks_of_node(world)}, "parallel": {"dp_shard": world}}
    return {**config, **changed}


# -- what is not as it was when its checkpoint is tested


def with_changes(over: Mapping[str, Any], **order: Any) -> Test:
    return lambda subject, place: subject.verdict(subject.folder(TESTED), world=1, over=dict(over), **order)


def other_data(subject: Subject, place: Path) -> RestoreVerdict:
    tokens = place / f"tokens-{next(subject.numbers)}"
    shutil.copytree(json.loads(subject.source.dir.config.read_text())["data"]["path"], tokens)
    for shard in tokens.glob("*.bin"):
        data = shard.read_bytes()
        shard.write_bytes(b"".join(data[at : at + 2] for at in range(len(data) - 2, -1, -2)))  # other text, as long
    return subject.verdict(subject.folder(TESTED), world=1, over={"data": {"path": str(tokens)}})


def other_torch(subject: Subject, place: Path) -> RestoreVerdict:
    """An older torch computes other last bits, imitated by another learning rate."""
    copy = subject.copy(TESTED)
    state, extra, world = read_all(copy)
    save_anew(copy, state, {**extra, "software": {**extra["software"], "torch": "2.12.1"}}, world)
    return subject.verdict(copy, world=1, over={"optimizer": {"lr": 1.1e-2}})


def on_layout(world: int, **parallel: int) -> Test:
    return lambda subject, place: subject.verdict(
        subject.folder(TESTED), f"{world}", world=world, parallel=parallel, same_layout=False
    )


def of_second_attempt(subject: Subject, place: Path) -> RestoreVerdict:
    """Test on the layout of the submitted run, which has trained none of the compared steps."""
    (folder,) = subject.source.dir.checkpoints.glob("step-00000009.*")
    config = json.loads(subject.source.attempt.config.read_text())
    digest = hash_config(config)
    world = 3 - subject.source.world
    parallel = {"dp_shard": world}
    return subject.verdict(
        folder, world=world, parallel=parallel, same_layout=False, config_digest=digest, steps_digest=digest
    )


def own(name: str) -> Kind:
    over = {"workload": {"target": f"{targets.__name__}:{name}"}, "train": {"dtype": "float32"}}
    return Kind(name=name, over={**over, "parallel": {"strategy": "ddp"}})


KINDS: tuple[Kind, ...] = (
    *(own(name) for name in targets.KEPT),
    Kind(name="skipped-batches", train=skipping),
    Kind(name="from-one-that-skipped", train=from_one_that_skipped),
    Kind(name="own-from-one-that-skipped", over=own("SkippedUpdates").over, train=from_one_that_skipped),
    Kind(name="float16", over={"train": {"dtype": "float16"}}),
    Kind(name="grown-by-attempt", train=resumed_elsewhere, test=of_second_attempt, outcomes=EITHER),
    Kind(
        name="shrunk-by-attempt",
        world=2,
        over={"parallel": {"dp_shard": 2}},
        train=resumed_elsewhere,
        test=of_second_attempt,
        outcomes=EITHER,
    ),  # fmt: skip
    Kind(name="edited-readme-model", test=with_changes({"model": {"layers": 3}}), outcomes=NOT_COMPARABLE),
    Kind(name="wider-model", test=with_changes({"model": {"dim": 64}}), outcomes=NOT_COMPARABLE),
    Kind(name="edited-code", test=with_changes({"optimizer": {"lr": 0.5}}, differs=("code.user",))),
    Kind(
        name="other-packages",
        test=with_changes({"optimizer": {"lr": 0.5}}, differs=("env.packages",)),
        outcomes=NOT_COMPARABLE,
    ),  # fmt: skip
    Kind(
        name="diverging-code", test=with_changes({"optimizer": {"lr": 1e30}}, differs=("code.user",)), outcomes=EITHER
    ),
    Kind(name="other-seed", test=with_changes({"train": {"seed": 99}}), outcomes=NOT_COMPARABLE),
    Kind(name="other-data", test=other_data, outcomes=NOT_COMPARABLE),
    Kind(name="other-torch", test=other_torch, outcomes=NOT_COMPARABLE),
    Kind(name="bfloat16-on-two", test=on_layout(2, dp_shard=2), outcomes=EITHER),
    Kind(name="float32-on-two", over={"train": {"dtype": "float32"}}, test=on_layout(2, dp_shard=2), outcomes=RESTORED),
    Kind(name="experts-on-two", over=EXPERTS, test=on_layout(2, dp_shard=2), outcomes=EITHER),
    Kind(
        name="experts-of-tp-on-one",
        over=merged(EXPERTS, {"parallel": {"tp": 2}}),
        world=2,
        test=on_layout(1),
        outcomes=EITHER,
    ),  # fmt: skip
    Kind(name="own-on-two", over=own("SkippedUpdates").over, test=on_layout(2, dp_shard=2), outcomes=EITHER),
)
