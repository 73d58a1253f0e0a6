"""Position of data: a number, or a state for each data-parallel rank."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.trainer.worker.hooked_workload import Reshardable, Shuffled
from tests.trainer.worker.my_workload import Points
from trainer.protocol.config_sections.recipe_config import ClusterShape
from trainer.worker.data import with_position
from trainer.worker.saved_state.data_state import FACTS, DataState, NotReshardable, plain_position, require_resharding
from trainer.worker.workload import WorkloadError


def state_of(data: Any, dp_rank: int = 0, dp_size: int = 1) -> DataState:
    layout: Any = SimpleNamespace(dp_rank=dp_rank, dp_size=dp_size)
    return DataState(with_position(data), layout, nn.Linear(1, 1), torch.device("cpu"))


def saved(kind: Any, size: int, steps: int = 7) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], list[Any]]:
    ranks, tensors, row = [], {}, []
    for rank in range(size):
        data = kind(rank, size)
        for _ in range(steps):
            data.take()
        state = state_of(data, rank, size)
        ranks.append({FACTS: state.facts()})
        tensors.update({key: tensor.clone() for key, tensor in state.tensors().items()})
        row.append(data)
    return ranks, tensors, row


def restored(state: DataState, ranks: list[dict[str, Any]], tensors: dict[str, torch.Tensor], consumed: int) -> None:
    for key, target in state.targets(ranks).items():
        target.copy_(tensors[key])
    state.restore(consumed)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_goes_on_where_it_stood(rank: int) -> None:
    ranks, tensors, row = saved(Shuffled, 2)
    again = Shuffled(rank, 2)
    restored(state_of(again, rank, 2), ranks, tensors, 7)
    for _ in range(12):
        (x, _), (y, _) = again.take()[0], row[rank].take()[0]
        assert torch.equal(x, y)


def test_another_number_of_ranks_is_refused_in_words() -> None:
    ranks, tensors, _ = saved(Shuffled, 2)
    said = r"saved on 2 data-parallel ranks but there are 3 now: .* give Shuffled a load_state_dicts\(states\)"
    with pytest.raises(NotReshardable, match=said):
        restored(state_of(Shuffled(0, 3), 0, 3), ranks, tensors, 7)


def test_data_that_reshards_itself_gets_all_states_in_order() -> None:
    ranks, tensors, row = saved(Reshardable, 2)
    again = Reshardable(3, 4)
    restored(state_of(again, 3, 4), ranks, tensors, 7)
    assert again.seen == 2
    assert torch.equal(again.noise, row[1].noise)


def test_a_number_of_an_old_checkpoint_is_sought() -> None:
    points = Points(0, 1)
    restored(state_of(points), [], {}, 9)
    assert points.consumed == 9

    class Both(Shuffled):
        def seek(self, consumed: int) -> None:
            self.epoch = consumed

    both = Both(0, 1)
    restored(state_of(both), [], {}, 9)
    assert both.epoch == 9
    with pytest.raises(WorkloadError, match=r"has only a number \(9\) .* give Shuffled a `seek\(consumed\)`"):
        restored(state_of(Shuffled(0, 1)), [], {}, 9)


def test_the_very_beginning_needs_no_state() -> None:
    restored(state_of(Shuffled(0, 1)), [], {}, 0)


def test_a_state_that_is_empty_is_one() -> None:
    class Nothing:
        def take(self):
            return []

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            self.loaded = state

    nothing = Nothing()
    restored(state_of(nothing), [{FACTS: state_of(Nothing()).facts()}], {}, 5)
    assert nothing.loaded == {}


def test_what_cannot_be_continued_is_refused_at_once() -> None:
    with pytest.raises(WorkloadError, match="list, which build_data\\(\\) returns, cannot be continued"):
        state_of([1, 2])
    ranks, tensors, _ = saved(Shuffled, 1)
    with pytest.raises(WorkloadError, match="Points has no state_dict"):
        restored(state_of(Points(0, 1)), ranks, tensors, 7)


FEWER, NEVER, SPARES_ALONE = (ClusterShape(nodes=4, min_nodes=least) for least in (2, 0, 4))


def test_a_run_that_may_have_fewer_nodes_is_refused_data_that_cannot_go_on_there() -> None:
    said = r"cluster\.min_nodes=2: with fewer nodes, training .* the state of Shuffled, .* ~cluster\.min_nodes"
    with pytest.raises(WorkloadError, match=said):
        require_resharding(with_position(Shuffled(0, 2)), FEWER)
    for data, cluster in (
        (Shuffled(0, 2), NEVER), (Shuffled(0, 2), SPARES_ALONE), (Reshardable(0, 2), FEWER), (Points(0, 2), FEWER),
    ):  # fmt: skip
        require_resharding(with_position(data), cluster)


@pytest.mark.parametrize(("consumed", "plain"), [(3, 3), (2.0, 2.0), (torch.tensor(7), 7), (True, True)])
def test_a_position_is_saved_as_a_plain_number(consumed: object, plain: float) -> None:
    found = plain_position(consumed)
    assert (found, type(found)) == (plain, type(plain))


@pytest.mark.parametrize("consumed", [torch.tensor(1.5), "7", None])
def test_a_position_that_is_no_number_is_refused_by_name(consumed: object) -> None:
    with pytest.raises(WorkloadError, match="the data's `consumed` is .*: must be a whole number"):
        plain_position(consumed)
