"""The table of adapters, and what every adapter has."""

import ast
import inspect
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.agent.adapters import registry
from trainer.agent.instrument import stop_agreement
from trainer.protocol.command_progress import ADAPTERS, CommandCheckpointsConfig


def test_every_adapter_has_all_functions() -> None:
    for name in registry.NAMES:
        adapter = registry.load(name)
        for function in ("install", "checkpoints", "damage", "resume"):
            wanted = list(inspect.signature(getattr(registry.Adapter, function)).parameters)[1:]
            assert list(inspect.signature(getattr(adapter, function)).parameters) == wanted, (name, function)
        assert adapter.resume("") == ({}, [])
        assert adapter.resume("/c/7")[0]["ORCH_RESUME_PATH"] == "/c/7"


def test_one_file_and_one_row_each() -> None:
    files = {path.stem for path in Path(registry.FOLDER).glob("*.py")} - {"__init__", "registry", "host"}
    assert files == set(registry.NAMES)


def test_programs_of_python_3_9_can_load_the_files() -> None:
    """They need only the standard library and the syntax of Python 3.9."""
    for path in [*Path(registry.FOLDER).glob("*.py"), Path(stop_agreement.__file__)]:
        tree = ast.parse(path.read_text(), feature_version=(3, 9))
        for node in tree.body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
                assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names, path


def test_the_first_framework_of_a_program_wins() -> None:
    assert registry.choose("torch,plain, hf") == "hf"
    assert registry.choose("torch") == "plain"
    with pytest.raises(LookupError, match="no adapter jax: the adapters are hf, "):
        registry.load("jax")


def test_files_of_programs_that_use_torch_save(tmp_path: Path) -> None:
    plain = registry.load("plain")
    for name in ("model_step_30.pt", "model_step_4.pt", "model_step_50.pt.tmp", "notes-7.txt", "best.pt"):
        (tmp_path / name).write_bytes(b"PK")
    assert plain.checkpoints(str(tmp_path)) == [
        (4, str(tmp_path / "model_step_4.pt")), (30, str(tmp_path / "model_step_30.pt")),
    ]  # fmt: skip
    (tmp_path / "model_step_30.pt").write_bytes(b"")
    assert plain.damage(str(tmp_path / "model_step_30.pt")) == "is empty"


def test_shards_in_a_trainer_checkpoint_follow_their_own_rules(write_folder: Callable[[str], Path]) -> None:
    checkpoint = write_folder("hf") / "checkpoint-6"
    shards = checkpoint / "global_step6"
    (write_folder("deepspeed") / "global_step50").rename(shards)
    for name in ("optimizer.pt", "model.safetensors"):
        (checkpoint / name).unlink()
    assert registry.find_damage("hf", str(checkpoint)) == ""
    (shards / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    missing = "global_step6 lacks zero_pp_rank_0_mp_rank_00_optim_states.pt"
    assert registry.find_damage("hf", str(checkpoint)) == missing
    fsdp = checkpoint / "optimizer_0"
    fsdp.mkdir()
    (fsdp / "__0_0.distcp").write_bytes(b"x")
    shutil.rmtree(shards)
    assert registry.find_damage("hf", str(checkpoint)) == "optimizer_0 lacks .metadata"


def test_the_configuration_knows_every_adapter_and_refuses_others() -> None:
    assert ADAPTERS == registry.NAMES
    with pytest.raises(ValueError, match=r"checkpoints\.adapter=jax: must be auto, hf, .*, dcp or plain"):
        CommandCheckpointsConfig(adapter="jax")
