"""Sequence parts: together the whole sequence, with padding at the end."""

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.models.llama import Llama
from trainer.parallel.apply.context_parallel import UlyssesAttention, apply, sequence_part
from trainer.parallel.context import CpMethod
from trainer.parallel.parallel_config import ParallelConfig
from trainer.protocol.config_sections.recipe_config import ExpertsConfig, ModelConfig, TrainConfig
from trainer.worker.reporting import phase_tracker
from trainer.worker.reporting.phase_tracker import waiting_for_peers
from trainer.worker.workload import WorkloadError


@pytest.mark.parametrize("method", [CpMethod.ULYSSES, CpMethod.RING])
@pytest.mark.parametrize(("length", "cp", "tp"), [(32, 2, 1), (33, 2, 1), (33, 4, 1), (31, 3, 1), (6, 4, 2), (3, 4, 1)])
def test_parts_are_the_whole(length: int, cp: int, tp: int, method: CpMethod) -> None:
    tokens = torch.arange(1, 2 * length + 1).reshape(2, length)
    parts = [sequence_part(length, ParallelConfig(cp=cp, tp=tp), method, rank) for rank in range(cp)]
    found = torch.zeros_like(tokens)
    for part in parts:
        own = part.select_tokens(tokens)
        assert own.shape == (2, len(part.positions))
        assert len(part.positions) == len(parts[0].positions)
        assert len(part.positions) % tp == 0
        assert not own[:, part.real :].any()
        found[:, part.positions[: part.real]] = own[:, : part.real]
    assert torch.equal(found, tokens)
    assert sum(part.real for part in parts) == length


def test_rows_of_a_table_are_those_of_the_real_places() -> None:
    table = torch.arange(7)[None, :, None]
    head, tail = (sequence_part(7, ParallelConfig(cp=2), CpMethod.RING, rank) for rank in (1, 0))
    assert head.select_rows(table)[0, :, 0].tolist() == [2, 3, 4, 5]
    assert tail.select_rows(table)[0, :3, 0].tolist() == [0, 1, 6]


def test_a_ring_has_one_chunk_of_the_head_and_one_of_the_tail() -> None:
    config = ParallelConfig(cp=3)
    assert [sequence_part(12, config, CpMethod.RING, rank).chunks for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert [sequence_part(12, config, CpMethod.ULYSSES, rank).chunks for rank in range(3)] == [(0,), (1,), (2,)]


def test_a_model_that_is_asked_for_all_logits_says_that_no_rank_has_them() -> None:
    model = Llama(ModelConfig(dim=16, layers=1, heads=2, kv_heads=2, ffn_dim=8), TrainConfig(seq_len=8))
    model.part = sequence_part(8, ParallelConfig(cp=2), CpMethod.RING, 0)
    with pytest.raises(
        WorkloadError,
        match="2 ranks share each sequence, .* call the model with its targets",
    ):
        model(torch.zeros(1, 8, dtype=torch.int64))


@pytest.mark.parametrize(
    ("length", "cp", "tp", "real"),
    [
        (8, 1, 2, [[4, 4]]),  # no padding
        (7, 1, 2, [[4, 3]]),
        (6, 2, 2, [[2, 2], [2, 0]]),
        (3, 4, 1, [[1], [1], [1], [0]]),
    ],
)
def test_experts_are_given_the_real_tokens_of_each_rank_alone(
    length: int, cp: int, tp: int, real: list[list[int]]
) -> None:
    parallel = ParallelConfig(cp=cp, tp=tp, cp_method=CpMethod.ULYSSES)
    for of_cp, row in enumerate(real):
        for of_tp, due in enumerate(row):
            group: Any = SimpleNamespace(rank=lambda at=of_cp: at, size=lambda: cp)
            layout: Any = SimpleNamespace(
                sequence_ranks=SimpleNamespace(get_group=lambda found=group: found), place={"cp": of_cp, "tp": of_tp},
                sizes={"tp": tp},
            )  # fmt: skip
            for experts in (0, 4):
                config: Any = SimpleNamespace(
                    model=ModelConfig(heads=4, experts=ExpertsConfig(count=experts)), parallel=parallel,
                    train=SimpleNamespace(seq_len=length),
                )  # fmt: skip
                layer = SimpleNamespace(attention=SimpleNamespace(), feed_forward=SimpleNamespace(real=None))
                model = SimpleNamespace(layers=[layer])
                apply(model, layout, config)
                assert layer.feed_forward.real == (due if experts else None)
                assert isinstance(layer.attention.attend, UlyssesAttention)


@pytest.mark.parametrize(("device", "due"), [("cpu", ["act"]), ("meta", ["pause", "act", "resume"])])
def test_a_wait_is_left_out_of_the_measurement_where_it_would_be_measured(
    monkeypatch: pytest.MonkeyPatch, device: str, due: list[str]
) -> None:
    calls: list[str] = []
    tracker = SimpleNamespace(pause=lambda: calls.append("pause"), resume=lambda: calls.append("resume"))
    monkeypatch.setattr(phase_tracker, "current_tracker", lambda: tracker)
    with suppress(OSError), waiting_for_peers(torch.device(device)):
        calls.append("act")
        raise OSError
    assert calls == due
