"""Peak memory of a pipeline rank, calculated by hand."""

from trainer.costs.simulation import Kind, PipelineAction, Table
from trainer.costs.stage_memory import pipeline_peak_bytes
from trainer.protocol.config import JobConfig
from trainer.protocol.plain_data import build

F, B = Kind.FORWARD, Kind.BACKWARD
DIM, FFN, HEADS, ROWS, TOKENS = 32, 64, 4, 320, 512
LAYER = 8 * DIM + 2 * DIM + 4 * FFN + HEADS + 2
"""Floats per token that a layer keeps: norms twice, queries, keys, values and feed-forward."""
KEPT = 4 * TOKENS * (LAYER + DIM + ROWS + 1)
"""Bytes that the last stage keeps: one layer, the last norm with its input, and the logits."""
BOUNDARY = 4 * TOKENS * DIM
WEIGHTS = 4 * (4 * DIM * DIM + 3 * DIM * FFN + 2 * DIM + DIM + ROWS * DIM)


def config(strategy: str) -> JobConfig:
    made = build(
        JobConfig,
        {
            "cluster": {"ranks_per_node": 2},
            "model": {"dim": DIM, "layers": 2, "heads": HEADS, "kv_heads": HEADS, "ffn_dim": FFN, "vocab_size": ROWS},
            "parallel": {"strategy": strategy, "pipeline": {"stages": 2, "micro_batches": 3}},
            "train": {"batch_size": 3, "seq_len": TOKENS, "dtype": "float32"},
        },
    )
    assert isinstance(made, JobConfig)
    return made


def table(*order: tuple[Kind, int]) -> Table:
    last: list[PipelineAction] = []
    for kind, number in order:
        last += [PipelineAction(1, Kind.RECEIVE_ACTIVATION, number)] if kind is F else []
        last.append(PipelineAction(1, kind, number))
    return [[], last]


def test_activations_of_all_micro_batches_or_of_one() -> None:
    made = config("ddp")
    all_forward = pipeline_peak_bytes(made, table((F, 0), (F, 1), (F, 2), (B, 0), (B, 1), (B, 2)), rank=1)
    in_turn = pipeline_peak_bytes(made, table((F, 0), (B, 0), (F, 1), (B, 1), (F, 2), (B, 2)), rank=1)
    # Before the first backward pass there are no gradients; before the last one there are, and two micro-batches have
    # left what was received, and the gradient of it that was sent.
    assert all_forward - in_turn == 2 * (KEPT + BOUNDARY) - (WEIGHTS + 4 * BOUNDARY)


def test_gathered_parameters_are_there_besides() -> None:
    order = table((F, 0), (B, 0), (F, 1), (B, 1), (F, 2), (B, 2))
    plain, sharded = (pipeline_peak_bytes(config(strategy), order, rank=1) for strategy in ("ddp", "fsdp"))
    assert sharded - plain == WEIGHTS
