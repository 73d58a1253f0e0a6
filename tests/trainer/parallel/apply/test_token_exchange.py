"""Token exchange: its timing, and the rows of each expert."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from trainer.models.mixture_of_experts import Experts
from trainer.parallel.apply import expert_parallel
from trainer.parallel.apply.expert_parallel import TokenExchange, _expert_order
from trainer.protocol.config_sections.recipe_config import ExpertsConfig


class OneRank:
    def size(self) -> int:
        return 1


class Tracker:
    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def pause(self) -> None:
        self._calls.append("pause")

    def resume(self) -> None:
        self._calls.append("resume")


class Recording(Experts):
    calls: list[str]

    def forward(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        self.calls.append(f"experts {list(counts)}")
        rows.register_hook(lambda _: self.calls.append("gradient"))
        return super().forward(rows, counts)


def test_what_experts_compute_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def to_itself(received: torch.Tensor, sent: torch.Tensor, *_: object, group: Any) -> None:
        calls.append(f"exchange {len(sent)}")
        received.copy_(sent)

    monkeypatch.setattr(expert_parallel.dist, "all_to_all_single", to_itself)
    monkeypatch.setattr(expert_parallel, "current_tracker", lambda: Tracker(calls))
    experts = Recording(4, ExpertsConfig(count=3, ffn_dim=8))
    experts.calls = calls
    for weight in experts.parameters():
        torch.nn.init.normal_(weight)
    rows = torch.randn(7, 4, requires_grad=True)
    out = TokenExchange(OneRank())(rows, torch.tensor([4, 0, 3]), experts)  # type: ignore[arg-type]
    out.sum().backward()
    there, back = ["exchange 7", "pause"], ["resume", "exchange 7"]
    assert calls == ["exchange 1", *there, "experts [4, 0, 3]", *back, *there, "gradient", *back]
    due = Experts.forward(experts, rows, [4, 0, 3])
    assert torch.equal(out, due)


def test_rows_are_sorted_by_expert_and_then_by_rank() -> None:
    order = _expert_order(torch.tensor([[1, 0, 2], [2, 1, 0]]))
    assert order.tolist() == [0, 3, 4, 5, 1, 2]
