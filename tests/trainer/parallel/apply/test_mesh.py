"""Position of a rank in a layout, and its meshes."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.parallel.apply import mesh
from trainer.parallel.apply.mesh import Layout
from trainer.parallel.parallel_config import ParallelConfig

CPU = torch.device("cpu")
SIZES = {"pp": 2, "dp_replicate": 3, "dp_shard": 2, "cp": 2, "tp": 2}


class Dimensions:
    def __init__(self, **sizes: int) -> None:
        self.sizes, self.mesh_dim_names = sizes, tuple(sizes)

    def __getitem__(self, names: Any) -> Any:
        found = names if isinstance(names, tuple) else (names,)
        return SimpleNamespace(names=found, size=lambda: self.sizes[found[0]])


def layout(rank: int, sizes: dict[str, int] = SIZES, **more: Any) -> Layout:
    world = math.prod(sizes.values())
    whole: Any = Dimensions(**sizes)
    return Layout(
        **{
            "mesh": whole,
            "sequence_mesh": None,
            "sizes": sizes,
            "device": CPU,
            "rank": rank,
            "world_size": world,
            **more,
        }
    )


def test_ranks_count_from_tensor_parallelism_outwards() -> None:
    one = layout(2 * (2 * (2 * (3 * 1 + 2) + 1) + 0) + 1)
    assert tuple(one.place.values()) == (1, 2, 1, 0, 1)
    assert (one.dp_size, one.dp_rank) == (6, 5)
    assert one.ranks_per_share == 8
    assert one.token_rank == 10
    assert one.generator_rank == 22


def test_those_that_share_a_sequence_draw_other_numbers_and_those_of_one_tensor_parallel_group_the_same() -> None:
    ranks = [layout(number) for number in range(48)]
    assert sorted({one.generator_rank for one in ranks}) == list(range(24))
    assert [ranks[at].generator_rank for at in (0, 1, 2, 3, 4)] == [0, 0, 1, 1, 2]
    assert [ranks[at].dp_rank for at in (0, 3, 4, 8, 24)] == [0, 0, 1, 2, 0]
    assert [ranks[at].token_rank for at in (0, 2, 4, 24)] == [0, 1, 2, 0]


def test_replicas_are_a_dimension_of_fsdp_only_where_there_are_several() -> None:
    assert layout(0).fsdp.names == ("dp_replicate", "dp_shard")  # type: ignore[attr-defined]
    assert layout(0, {**SIZES, "dp_replicate": 1}).fsdp.names == ("dp_shard",)  # type: ignore[attr-defined]
    experts: Any = Dimensions(dp_replicate=2, dp_shard=2, ep=2)
    assert layout(0, expert_mesh=experts).fsdp_of_experts.names == ("dp_replicate", "dp_shard")  # type: ignore[attr-defined]
    one: Any = Dimensions(dp_replicate=1, dp_shard=2, ep=2)
    few = layout(0, expert_mesh=one)
    assert few.fsdp_of_experts.names == ("dp_shard",)  # type: ignore[attr-defined]
    assert few.ep.names == ("ep",)  # type: ignore[attr-defined]


def test_dimensions_by_their_names() -> None:
    sequences: Any = Dimensions(dp=6, cp=2, tp=2)
    one = layout(0, sequence_mesh=sequences)
    assert (one.tp.names, one.pp.names, one.sequence_ranks.names) == (("tp",), ("pp",), ("cp",))  # type: ignore[attr-defined]


@pytest.mark.usefixtures("world")
def test_one_rank_has_a_group_for_every_dimension() -> None:
    made = mesh.build(ParallelConfig(), CPU, 0, 1)
    assert made.mesh.mesh_dim_names == ("dp_replicate", "dp_shard", "tp")
    assert (made.sequence_mesh, made.expert_mesh) == (None, None)
    assert set(made.sizes.values()) == {1}
    assert (made.rank, made.world_size, made.device) == (0, 1, CPU)
    assert made.tp.size() == made.fsdp.size() == 1


@pytest.mark.usefixtures("world")
def test_a_mesh_of_another_world_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^a mesh of \{'dp': 2, 'tp': 1\} does not have 1 ranks$"):
        mesh._Meshes(CPU, 0, 1).build_mesh({"dp": 2, "tp": 1})
