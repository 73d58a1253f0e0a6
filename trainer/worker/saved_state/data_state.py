"""Position of a rank's data, which is a number or a separate state for each data-parallel rank."""

import operator
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import nn

from trainer.parallel.apply.mesh import Layout
from trainer.protocol.config_sections.recipe_config import ClusterShape
from trainer.worker.data import CountedData, Data, unwrap_data
from trainer.worker.saved_state.object_state import ObjectState
from trainer.worker.workload import WorkloadError

FACTS = "data"
"""Key of the data state in a rank's facts."""


class NotReshardable(WorkloadError):
    """The data state was saved for a different number of data-parallel ranks. The checkpoint is sound."""


def _name(dp_rank: int) -> str:
    return f"data/rank-{dp_rank:05d}"


def plain_position(consumed: Any) -> int | float:
    """Return `consumed`, which may be a tensor or a NumPy number, as a plain number. Raises WorkloadError."""
    if isinstance(consumed, int | float):
        return consumed
    try:
        return operator.index(consumed)
    except TypeError as error:
        raise WorkloadError(f"the data's `consumed` is {consumed!r}: must be a whole number") from error


class DataState:
    """Saves and restores the state of one rank's data. Ranks that share layers or sequences have the same data."""

    def __init__(self, data: Data, layout: Layout, model: nn.Module, device: torch.device) -> None:
        """Check the data's interface. Raises WorkloadError for data without a savable position."""
        self._data, self._owner = data, cast(Any, unwrap_data(data))
        self._dp_rank, self._dp_size, self._model, self._device = layout.dp_rank, layout.dp_size, model, device
        self._kind = type(self._owner).__name__
        has = [callable(getattr(self._owner, name, None)) for name in ("state_dict", "load_state_dict", "seek")]
        self._stateful = has[0] and has[1]
        if not self._stateful and (isinstance(data, CountedData) or not has[2]):
            raise WorkloadError(
                f"{self._kind}, which build_data() returns, cannot be continued after a restart: give it `consumed` "
                "and `seek(consumed)`, or `state_dict()` and `load_state_dict(state)`"
            )
        self._own = ObjectState(self._owner if self._stateful else None, _name(self._dp_rank), model, device)
        self._saved: list[tuple[ObjectState, Mapping[str, Any]]] = []

    def freeze_state(self) -> AbstractContextManager[None]:
        """Within the context, take tensors and facts from a single state, because a thread may read ahead."""
        return self._own.freeze_state()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the state, under this data-parallel rank's names."""
        return self._own.tensors()

    def facts(self) -> dict[str, Any]:
        """Return the rest of the state, which is empty if the position is a number."""
        own = {"dp_rank": self._dp_rank, "dp_size": self._dp_size, **self._own.facts()}
        return own if self._stateful else {}

    @property
    def reordered_sets(self) -> frozenset[str]:
        """Paths of sets in the newest state whose iteration order a restart would change."""
        return self._own.reordered_sets

    def targets(self, ranks: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Allocate the tensors for this rank's state from the facts of all `ranks`. Raises NotReshardable."""
        states = {one[FACTS]["dp_rank"]: one[FACTS] for one in ranks if FACTS in one}
        self._saved = [(self._state_for_rank(rank), states[rank]) for rank in self._required_ranks(states)]
        return {key: tensor for state, facts in self._saved for key, tensor in state.targets(facts).items()}

    def _required_ranks(self, states: Mapping[int, Mapping[str, Any]]) -> list[int]:
        if not states:
            return []
        size = next(iter(states.values()))["dp_size"]
        if not self._stateful:
            raise WorkloadError(
                f"the checkpoint has a data state, but {self._kind} has no state_dict() or load_state_dict()"
            )
        if size == self._dp_size:
            return [self._dp_rank]
        if not callable(getattr(self._owner, "load_state_dicts", None)):
            raise NotReshardable(
                f"the data state was saved on {_ranks(size)} but there are {self._dp_size} now: resume with the "
                f"same number, or give {self._kind} a load_state_dicts(states), which receives the states of all "
                f"{size} ranks"
            )
        return list(range(size))

    def _state_for_rank(self, dp_rank: int) -> ObjectState:
        if dp_rank == self._dp_rank:
            return self._own
        return ObjectState(None, _name(dp_rank), self._model, self._device)

    def restore(self, consumed: int) -> None:
        """Go to the checkpoint's position `consumed`. Call this after `targets` have been filled."""
        if callable(getattr(self._data, "seek", None)):
            self._data.seek(consumed)
        states = [state.decode_state(facts) if "value" in facts else {} for state, facts in self._saved]
        if not states:
            self._seek(consumed)
        elif self._saved[0][1]["dp_size"] == self._dp_size:
            self._owner.load_state_dict(states[0])
        else:
            self._owner.load_state_dicts(states)

    def _seek(self, consumed: int) -> None:
        """Seek to `consumed`, because the checkpoint has no data state."""
        if not isinstance(self._data, CountedData) or not consumed:
            return
        seek = getattr(self._owner, "seek", None)
        if not callable(seek):
            raise WorkloadError(
                f"the checkpoint has only a number ({consumed}) as its data position: give {self._kind} a "
                "`seek(consumed)` that moves to it, or start from the weights alone: "
                "`orch ckpt import DIR CONFIG --weights-only`"
            )
        seek(consumed)


def require_resharding(data: Data, cluster: ClusterShape) -> None:
    """Raise WorkloadError if `cluster.min_nodes` allows a smaller world in which the data could not continue."""
    owner = unwrap_data(data)
    has = [callable(getattr(owner, name, None)) for name in ("state_dict", "load_state_dict", "load_state_dicts")]
    if 0 < cluster.min_nodes < cluster.nodes and has == [True, True, False]:
        raise WorkloadError(
            f"cluster.min_nodes={cluster.min_nodes}: with fewer nodes, training could not continue from the state of "
            f"{type(owner).__name__}, which build_data() returns: give it a load_state_dicts(states), which receives "
            "the states of all ranks, or remove the setting with ~cluster.min_nodes"
        )


def _ranks(count: int) -> str:
    return "1 data-parallel rank" if count == 1 else f"{count} data-parallel ranks"
