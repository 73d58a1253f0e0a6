"""`orch submit --from RUN@STEP`: what a new run takes from another one's checkpoint, and what is refused."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from checkpointing.retention.garbage import pinned_names
from checkpointing.storage.backends import LocalStorage
from checkpointing.storage.durable import canonical
from orchestrator.cli.runs.branch import branch
from orchestrator.cli.terminal.render import Screen
from orchestrator.states import Trust
from tests.checkpointing.made_checkpoint import make
from tests.installed_distributions import install
from tests.orchestrator.cli.conftest import Patch, Seeds, Type
from tests.orchestrator.tiny_config import tiny_config
from trainer.protocol import skipped_batches
from trainer.protocol.run_dir import RunDir
from trainer.protocol.skipped_batches import Skip
from trainer.protocol.user_code.code_record import CodeRecord

NONCE = "0123abcd"


def place(seeds: Seeds, run: str) -> Path:
    return seeds.root / run / "checkpoints"


@pytest.fixture
def run(seeds: Seeds, tmp_path: Path) -> str:
    name = seeds.run()
    place(seeds, name).mkdir(parents=True)
    make(LocalStorage(place(seeds, name)), 50, nonce=NONCE, now=time.time())
    data = tiny_config(seeds.root)
    data["data"]["path"] = str(tmp_path)
    (seeds.root / name / "config.json").write_bytes(canonical(data))
    second = seeds.root / name / "attempts" / "002"
    second.mkdir(parents=True)
    (second / "config.json").write_bytes(canonical({**data, "optimizer": {**data["optimizer"], "lr": 0.9}}))
    return name


def preview(orch: Type, *words: str) -> dict[str, Any]:
    shown = orch("submit", *words, "--dry-run", "--json")
    assert shown.code == 0, shown.err
    return dict(shown.data["config"])


def test_branch_uses_config_of_checkpoint(orch: Type, seeds: Seeds, run: str) -> None:
    config = preview(orch, "--from", f"{run}@50", "optimizer.warmup_steps=3")
    assert (config["name"], config["optimizer"]["lr"], config["optimizer"]["warmup_steps"]) == ("tiny-gpt", 0.003, 3)


def test_branch_from_smaller_attempt_has_full_size(orch: Type, seeds: Seeds, run: str) -> None:
    folder = seeds.root / run
    full = json.loads((folder / "config.json").read_text())
    small = {**full, "cluster": {**full["cluster"], "nodes": 1}, "parallel": {**full["parallel"], "dp_shard": 1}}
    first = folder / "attempts" / "001"
    first.mkdir()
    (first / "config.json").write_bytes(canonical(small))
    assert preview(orch, "--from", f"{run}@50")["cluster"]["nodes"] == 1
    (first / "run-config.json").write_bytes(canonical(full))
    assert preview(orch, "--from", f"{run}@50")["cluster"]["nodes"] == full["cluster"]["nodes"] == 2


@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_lost_config_is_read_from_registry(orch: Type, seeds: Seeds, run: str, content: str | None) -> None:
    file = seeds.root / run / "config.json"
    data = json.loads(file.read_bytes())
    file.write_text(content or "")
    if content is None:
        file.unlink()
    seeds.store.note_attempt(run, 1, epoch=seeds.epoch, config_digest="nowhere")
    refused = orch("submit", "--from", f"{run}@50", "--dry-run")
    assert refused.code == 4
    assert "was saved with cannot be read: " in refused.err
    assert str(file) in refused.err
    digest = seeds.store.put_config({**data, "optimizer": {**data["optimizer"], "lr": 0.25}})
    seeds.store.note_attempt(run, 1, epoch=seeds.epoch, config_digest=digest)
    assert preview(orch, "--from", f"{run}@50")["optimizer"]["lr"] == 0.25


def test_a_branch_may_have_a_preset_of_its_own(orch: Type, seeds: Seeds, run: str) -> None:
    config = preview(orch, "tiny-gpt", "optimizer.lr=0.5", "--from", f"{run}@50", "--name", "probe")
    assert (config["name"], config["optimizer"]["lr"]) == ("probe", 0.5)


@pytest.mark.parametrize("key", ["model.layers=7", "train.seed=9", "train.batch_size=64", "data.shuffle=false"])
def test_what_does_not_fit_the_checkpoint_is_refused(orch: Type, seeds: Seeds, run: str, key: str) -> None:
    refused = orch("submit", "--from", f"{run}@50", key, "--dry-run")
    assert refused.code == 4
    assert f"{key.partition('=')[0]} must match the checkpoint's run" in refused.err


def test_branch_is_created_with_its_checkpoint(orch: Type, seeds: Seeds, run: str) -> None:
    refused = orch("submit", "--from", f"{run}@50", "checkpoint.tiers=[{path: /scratch}]", "--dry-run")
    assert refused.code == 2
    assert "checkpoint.tiers has no `run`" in refused.err


def test_branch_uses_packages_of_this_interpreter(orch: Type, seeds: Seeds, run: str, tmp_path: Path) -> None:
    install(tmp_path / "site", "torch", "1.0")
    attempt, folders = RunDir(seeds.root / run).attempt(1), (str(tmp_path / "site"),)
    attempt.path.mkdir(exist_ok=True)
    CodeRecord(packages={"torch": "1.0"}, site_folders=folders).write(attempt.code)
    words = f"env.packages differs from what {run} was trained with"
    assert words in orch("submit", "--from", f"{run}@50", "--dry-run").err
    python = "cluster.python=/opt/other/bin/python"
    assert words not in orch("submit", "--from", f"{run}@50", python, "--dry-run").err, "nothing is known of that"


def test_a_branch_trains_the_code_that_was_copied(orch: Type, seeds: Seeds, run: str, tmp_path: Path) -> None:
    folder = seeds.root / run
    config = json.loads((folder / "config.json").read_text())
    config["workload"] |= {"snapshot": True, "path": ["/moved/away"]}
    (folder / "config.json").write_bytes(canonical(config))
    copy = str(folder / "code" / "0")
    assert preview(orch, "--from", f"{run}@50")["workload"]["path"] == [copy]
    with branch(Screen(), f"{run}@50", None, ()) as (composed, _):
        pass
    assert composed.config.workload.path == (copy,), "its class is imported when it is submitted"


def test_branch_pins_its_checkpoint(seeds: Seeds, run: str) -> None:
    storage = LocalStorage(RunDir(seeds.root / run).checkpoints)
    with branch(Screen(), f"{run}@50", None, ()) as (_, begins):
        assert pinned_names(storage) == {Path(begins["checkpoint"]).name}
    assert not pinned_names(storage)


BAD = Skip(step=60, position=59, reason="loss nan")


def test_branch_inherits_skipped_batches(seeds: Seeds, run: str) -> None:
    def begins() -> dict[str, Any]:
        with branch(Screen(), f"{run}@50", None, ()) as (_, begins):
            return begins

    assert "skipped" not in begins()
    skipped_batches.add(RunDir(seeds.root / run).attempt(2), [BAD])
    assert begins()["skipped"] == [asdict(BAD)]


def test_damaged_list_of_skipped_batches_is_refused(orch: Type, seeds: Seeds, run: str) -> None:
    file = seeds.root / run / "attempts" / "002" / "skipped.json"
    file.write_text("{}")
    refused = orch("submit", "--from", f"{run}@50", "--dry-run")
    assert (refused.code, str(file) in refused.err) == (4, True)


def test_a_doubted_checkpoint_is_warned_of(orch: Type, seeds: Seeds, run: str) -> None:
    seeds.checkpoint(run, 50, Trust.SUSPECT)
    shown = orch("submit", "--from", f"{run}@50", "--dry-run")
    assert shown.code == 0
    assert "is SUSPECT" in shown.err
    assert "failed soon after" not in shown.err, "another reason may have made it so"


def test_a_default_may_be_restored_in_a_branch(orch: Type, seeds: Seeds, run: str) -> None:
    assert preview(orch, "--from", f"{run}@50", "~optimizer.warmup_steps")["optimizer"]["warmup_steps"] == 10
    assert preview(orch, "~optimizer.warmup_steps", "--from", f"{run}@50")["optimizer"]["warmup_steps"] == 10


def test_a_config_file_may_lie_in_the_home_folder(orch: Type, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").write_text("includes: [tiny-gpt]\noptimizer: {lr: 1e-4}\n")
    assert preview(orch, "~/mine.yaml")["optimizer"]["lr"] == 1e-4


def test_a_config_file_may_have_an_equals_sign_in_its_name(orch: Type, tmp_path: Path) -> None:
    file = tmp_path / "lr=1e-4.yaml"
    file.write_text("includes: [tiny-gpt]\noptimizer: {lr: 1e-4}\n")
    assert preview(orch, str(file))["optimizer"]["lr"] == 1e-4


def test_nothing_begins_with_a_corrupt_checkpoint(orch: Type, seeds: Seeds, run: str) -> None:
    seeds.checkpoint(run, 50, Trust.CORRUPT)
    refused = orch("submit", "--from", f"{run}@50", "--dry-run")
    assert refused.code == 7
    assert "is CORRUPT" in refused.err


def test_invalid_checkpoint_cannot_be_branched_from(orch: Type, seeds: Seeds, run: str) -> None:
    (saved,) = place(seeds, run).glob("step-00000050.*")
    file = max(saved.iterdir(), key=lambda path: path.stat().st_size)
    file.write_bytes(bytes(file.stat().st_size))
    assert orch("ckpt", "verify", f"{run}@50").code == 7
    refused = orch("submit", "--from", f"{run}@50", "--dry-run")
    assert refused.code == 7
    assert f"{saved.name} is INVALID: " in refused.err
    assert f"orch ckpt ls {run}" in refused.err


def test_a_checkpoint_without_its_run_has_no_config(orch: Type, seeds: Seeds, tmp_path: Path) -> None:
    make(LocalStorage(tmp_path), 50, nonce=NONCE)
    refused = orch("submit", "--from", tmp_path / f"step-00000050.001-{NONCE}", "--dry-run")
    assert refused.code == 4
    assert "not in a run folder that this host can see" in refused.err


def test_a_run_needs_a_config_or_a_checkpoint(orch: Type) -> None:
    nothing = orch("submit", "train.steps=5", "--dry-run")
    assert nothing.code == 2
    assert "CONFIG is missing" in nothing.err
