"""Real ranks build the layouts that submit accepts, and compute what one rank computes."""

from random import Random
from typing import Any

import pytest

from tests.trainer.parallel.grid import drawn, job, staged
from trainer.models.built_in import LlamaWorkload
from trainer.parallel.layout import problems

pytestmark = pytest.mark.multi

SMALL: dict[str, tuple[Any, ...]] = {
    "cluster.nodes": (1,),
    "cluster.ranks_per_node": (2, 3, 4),
    "model.heads": (2, 4, 6),
    "model.kv_heads": (1, 2, 3, 4),
    "model.dim": (24, 32, 48),
    "model.ffn_dim": (3, 6, 10, 64),
    "model.vocab_size": (257, 300, 330),
    "train.batch_size": (6, 8, 12),
    "train.micro_batch_size": (0, 1, 2, 3),
    "train.seq_len": (9, 12, 16, 18),
    "train.loss_chunks": (1, 2, 3),
}
"""Sizes of small models, many of which split into uneven parts."""


def accepted(count: int) -> list[dict[str, Any]]:
    """Return the first accepted random layouts: half with `tp`, half of the others with `cp`."""
    rng, found = Random(19), []
    while len(found) < count:
        values = drawn(rng, most_odd=3) | {key: rng.choice(choices) for key, choices in SMALL.items()}
        split = (1, 2, 1, 3 + len(found) // 4 % 2)[len(found) % 4]  # one in four: all ranks share each layer
        values |= {"parallel.tp": split} | ({"cluster.ranks_per_node": split} if split > 2 else {})
        if not len(found) % 4:  # two ranks share each sequence, or all
            values["parallel.cp"] = values["cluster.ranks_per_node"] if len(found) // 4 % 2 else 2
        if not problems(job(values)):  # cheaper than `refusal`, which also searches for sizes that fit
            found.append(values)
    return found


def accepted_in_stages(count: int) -> list[dict[str, Any]]:
    """Return the first accepted random layouts with a pipeline, each with a different name."""
    rng, found = Random(23), dict[str, dict[str, Any]]()
    while len(found) < count:
        values = drawn(rng, most_odd=0) | {key: rng.choice(choices) for key, choices in SMALL.items()}
        values = staged(rng, values) | {"cluster.ranks_per_node": rng.choice((2, 3, 4, 4, 8)), "parallel.dp_shard": 0}
        values["train.batch_size"] *= 4
        if not problems(job(values)):
            found.setdefault(name_of(values), values)
    return list(found.values())


def drawn_layout(at: int) -> dict[str, Any]:
    return accepted(at + 1)[at] if at < DRAWN else accepted_in_stages(at - DRAWN + 1)[-1]


def nested(values: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
        branch[name] = value
    return tree


def name_of(values: dict[str, Any]) -> str:
    config = job(values)
    sizes = config.parallel.mesh_sizes(config.cluster.world_size)
    pipeline = config.parallel.pipeline
    stages = f"{pipeline.schedule}-{pipeline.stages}-" if pipeline.stages > 1 else ""
    return f"{stages}{config.parallel.strategy}-{'x'.join(map(str, sizes))}"


def uneven(ranks: int, length: int, chunks: int, wrap: str = "Linear,Block", **parallel: Any) -> dict[str, Any]:
    """Parts of different lengths, and output weights that are gathered separately."""
    model = {"model.vocab_size": 320, "model.dim": 32, "model.ffn_dim": 64, "model.heads": 4, "model.kv_heads": 4}
    train = {"train.batch_size": 6, "train.seq_len": length, "train.loss_chunks": chunks}
    keys = {"fsdp.wrap": wrap, "cp": ranks, **parallel}
    return {"cluster.ranks_per_node": ranks, **model, **train, **{f"parallel.{key}": keys[key] for key in keys}}


UNEVEN = {
    "uneven, every token a chunk": uneven(2, 9, 9),
    "uneven, ring, zero2": uneven(2, 9, 9, cp_method="ring", wrap="100", strategy="zero2"),
    "uneven, zero2": uneven(2, 9, 9, strategy="zero2"),
    "uneven, four ranks": uneven(4, 10, 5, cp_method="ulysses"),
    "uneven, ring of four ranks": uneven(4, 10, 5, cp_method="ring", wrap="100"),
}
"""Layouts in which some ranks have fewer tokens than chunks."""
SAMPLE = tuple(UNEVEN)[:2]
DRAWN, STAGED = 40, 24
"""Numbers of random layouts without and with a pipeline; the fast tests use the first."""


@pytest.mark.parametrize(
    "layout",
    [pytest.param(at, id=f"drawn {at}", marks=pytest.mark.proof if at else ()) for at in range(DRAWN)]
    + [pytest.param(DRAWN + at, id=f"in stages {at}", marks=pytest.mark.proof) for at in range(STAGED)]
    + [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.proof) for name in UNEVEN],
)
def test_ranks_of_an_accepted_layout_train(undisturbed, make_run, layout):
    values = UNEVEN[layout] if layout in UNEVEN else drawn_layout(layout)
    LlamaWorkload(job(values))
    over = nested(values)
    world = over.pop("cluster")["ranks_per_node"]
    over["train"] |= {"steps": 1, "dtype": "float32"}
    run = make_run(world, **over)
    assert run.train()["codes"] == [0] * world, run.log()
    whole = undisturbed(1, model=over["model"], train={**over["train"], "micro_batch_size": 0, "loss_chunks": 1})
    assert run.losses()[1] == pytest.approx(whole.losses()[1], rel=1e-4)
    assert run.metrics()[1]["grad_norm"] == pytest.approx(whole.metrics()[1]["grad_norm"], rel=1e-3)
