"""Keys of workloads are refused for a `command`, on which they have no effect; presets may have them."""

from pathlib import Path

import pytest

from orchestrator.config.compose import compose, recompose
from orchestrator.errors import ConfigError

COMMAND = "command=[python, train.py]"


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("train.steps=5", "pass an option to the program"),
        ("optimizer.lr=1e-3", "pass an option to the program"),
        ("+workload.args.width=3", "pass an option to the program"),
        ("checkpoint.every=5", "checkpoints.path=FOLDER tells orch where they are"),
        ("checkpoint.tiers=[{path: run}]", "checkpoints.path=FOLDER"),
        ("parallel.tp=2", "the program creates its own mesh"),
        ("detection.spike.roll_backs=1", "orch does not see the program's loss"),
    ],
)
def test_ineffective_overrides_are_refused(override: str, instead: str) -> None:
    with pytest.raises(ConfigError, match="has no effect on a `command`") as refused:
        compose("torchrun-script", [COMMAND, override])
    assert refused.value.what.startswith(override.lstrip("+").partition("=")[0])
    assert refused.value.where.startswith("override #2")
    assert instead in refused.value.hint
    with pytest.raises(ConfigError, match="has no effect on a `command`"):
        recompose(compose("torchrun-script", [COMMAND]).data, [override])


def test_a_file_of_the_run_is_judged_presets_and_standing_files_are_not(tmp_path: Path) -> None:
    mine, site = tmp_path / "mine.yaml", tmp_path / "site.yaml"
    mine.write_text("includes: [tiny-gpt]\ncommand: [python, train.py]\ntrain: {steps: 5}\n")
    with pytest.raises(ConfigError, match="train.steps: has no effect") as refused:
        compose(str(mine))
    assert refused.value.where == f"{mine}:3"
    compose(str(mine), ["~train.steps", "~command", "workload.target=trainer.models.built_in:LlamaWorkload"])
    mine.write_text("includes: [tiny-gpt]\ncommand: [python, train.py]\n")
    site.write_text("checkpoint: {keep: 5}\ndetection: {spike: {window: 9}}\n")
    assert compose(str(mine), environ={"HOME": str(tmp_path), "ORCH_SITE_CONFIG": str(site)}).config.command


def test_a_key_that_the_command_refers_to_has_an_effect() -> None:
    words = ["train.steps=5", "command=[python, train.py, --steps, '${train.steps}']"]
    assert compose("torchrun-script", words).config.command[-1] == "5"


@pytest.mark.parametrize("override", ["data.path=/x", "cluster.nodes=1", "recovery.backoff=1", "logs.keep=2", "name=a"])
def test_keys_that_have_an_effect_on_a_command_pass(override: str) -> None:
    compose("torchrun-script", [COMMAND, override])
