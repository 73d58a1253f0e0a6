"""DeepSpeed checkpoints: the number of ranks comes from the checkpoint itself; saves for other steps are derived."""

from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.agent.adapters import deepspeed, registry

DS = registry.load("deepspeed")
OPTIMIZER = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def test_checkpoints_of_a_real_engine_are_found_and_complete(write_folder: Callable[[str], Path]) -> None:
    folder = write_folder("deepspeed")
    (folder / "logs-7").mkdir()
    assert DS.checkpoints(str(folder)) == [
        (50, str(folder / "global_step50")), (100, str(folder / "global_step100")),
    ]  # fmt: skip
    assert [DS.damage(path) for _, path in DS.checkpoints(str(folder))] == ["", ""]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_optimizer_file_is_damage(write_folder: Callable[[str], Path], rank: int) -> None:
    """The last rank's file is missed too, because the model file names the number of ranks."""
    checkpoint = write_folder("deepspeed") / "global_step100"
    (checkpoint / OPTIMIZER.format(rank)).unlink()
    assert DS.damage(str(checkpoint)) == f"lacks {OPTIMIZER.format(rank)}"


def test_a_missing_model_file_is_damage(write_folder: Callable[[str], Path]) -> None:
    checkpoint = write_folder("deepspeed") / "global_step100"
    (checkpoint / "mp_rank_00_model_states.pt").unlink()
    assert DS.damage(str(checkpoint)) == "lacks mp_rank_00_model_states.pt"


def test_a_layout_without_the_files_of_all_ranks_is_complete(write_folder: Callable[[str], Path]) -> None:
    """MiCS, or a disk of each node: no checkpoint has them."""
    folder = write_folder("deepspeed")
    for checkpoint in ("global_step50", "global_step100"):
        (folder / checkpoint / OPTIMIZER.format(1)).unlink()
    assert [DS.damage(path) for _, path in DS.checkpoints(str(folder))] == ["", ""]


def test_stage_3_has_one_model_file_per_rank(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt").write_bytes(b"x")
    assert DS.damage(str(tmp_path)) == "lacks the ranks' optimizer states"
    for rank in range(3):
        (tmp_path / f"bf16_{OPTIMIZER.format(rank)}").write_bytes(b"x")
    assert DS.damage(str(tmp_path)) == ""
    (tmp_path / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    assert DS.damage(str(tmp_path)) == "lacks zero_pp_rank_1_mp_rank_00_model_states.pt"


@pytest.mark.parametrize("ranks", [2, 300, 70000])
def test_the_number_of_ranks_is_read_without_unpickling(tmp_path: Path, ranks: int) -> None:
    import torch

    path = tmp_path / "mp_rank_00_model_states.pt"
    torch.save({"module": torch.ones(3), "dp_world_size": ranks, "mp_world_size": 1}, path)
    assert deepspeed._count_ranks(str(path)) == ranks
    path.write_bytes(path.read_bytes()[:-40])
    assert deepspeed._count_ranks(str(path)) == 0


@pytest.mark.parametrize(
    ("tag", "state", "later"),
    [
        (None, {}, ("out", None, {})),
        ("step_20", {"step": 20}, ("out", "step_27", {"step": 27})),
        ("global_step20", {"next": 21}, ("out", "global_step27", {"next": 28})),
    ],
)
def test_a_save_for_another_step_is_derived(
    tag: str | None, state: dict[str, int], later: tuple[str, str | None, dict[str, int]]
) -> None:
    habit = deepspeed.Habit("out", tag, state, 20)
    assert habit.is_known
    assert habit.at(27) == later


@pytest.mark.parametrize(
    ("tag", "state"), [("epoch_1", {}), (None, {"epoch": 1}), (None, {"rng": b"x"}), (None, {"step": 20.0})]
)
def test_a_state_of_unknown_meaning_is_not_derived(tag: str | None, state: dict[str, object]) -> None:
    assert not deepspeed.Habit("out", tag, state, 20).is_known
