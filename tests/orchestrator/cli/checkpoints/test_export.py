"""`orch ckpt export` and `orch ckpt import`, as people and programs are told."""

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from checkpointing.tiers.catalog import Catalog
from checkpointing.verification.verify import verify
from orchestrator.cli.checkpoints import verify as verification
from orchestrator.cli.runs import submit
from orchestrator.controller import service
from orchestrator.registry.records import Checkpoint
from orchestrator.run_view import RunView, find_run
from orchestrator.states import Trust
from tests.orchestrator.cli.conftest import Seeds, Type

with warnings.catch_warnings():
    # torch complains once, when it is imported, that NumPy is not there; orch does not use it.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
    import torch

    from tests.checkpointing.engine.built_checkpoint import build
    from trainer.models.hugging_face import names
    from trainer.models.llama import Llama
    from trainer.protocol.config_sections.recipe_config import ModelConfig, TrainConfig
    from trainer.worker.saved_state.checkpoint_contents import model_tensors

SIZES = {"vocab_size": 257, "dim": 32, "layers": 1, "heads": 4, "kv_heads": 2, "ffn_dim": 48}
MODEL = [f"model.{key}={value}" for key, value in SIZES.items()]


@pytest.fixture
def run(seeds: Seeds) -> tuple[str, Path]:
    name = seeds.run()
    place = seeds.root / name
    model = Llama(ModelConfig(**SIZES), TrainConfig(seq_len=16))
    model.materialize(torch.device("cpu"), 1)
    tensors = {key: tensor.detach() for key, tensor in model_tensors(model).items()}
    moments = {f"optimizer/{key[6:]}/exp_avg": torch.ones_like(tensor) for key, tensor in tensors.items()}
    built = build({**tensors, **moments})
    built.extra = {"step": 5, "consumed": 80, "loss": 2.5, "seed": 1, "fingerprint": None}
    folder = built.write(place / "checkpoints", step=5)
    (place / "config.json").write_text(json.dumps({"model": SIZES, "train": {"seq_len": 16}}))
    return name, folder


def test_export_says_what_was_proved(orch: Type, run: tuple[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = orch("ckpt", "export", f"{run[0]}@5", out, "--json")
    assert done.code == 0, done.err
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors", "orch.json"]
    count = len(names(ModelConfig(**SIZES)))
    assert {key: done.data[key] for key in ("step", "run", "tensors", "compared", "converted")} == {
        "step": 5, "run": run[0], "tensors": count, "compared": count, "converted": 0,
    }  # fmt: skip
    assert json.loads((out / "orch.json").read_text())["checkpoint"] == run[1].name
    said = orch("ckpt", "export", run[0], tmp_path / "two").out
    assert f"{count} match the fingerprints recorded when it was saved" in said
    again = orch("ckpt", "export", run[0], out)
    assert (again.code, "not empty" in again.err) == (4, True)


def test_export_of_a_damaged_checkpoint_leaves_nothing(orch: Type, run: tuple[str, Path], tmp_path: Path) -> None:
    victim = run[1] / "__0_0.distcp"
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(bytes(data))
    bad = orch("ckpt", "export", run[0], tmp_path / "out")
    assert (bad.code, "nothing was exported" in bad.err, "__0_0.distcp chunk 0" in bad.err) == (7, True, True)
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def test_export_warns_of_a_suspect_checkpoint(orch: Type, run: tuple[str, Path], seeds: Seeds, tmp_path: Path) -> None:
    row = {"name": run[1].name, "path": str(run[1]), "reason": "ValueError twice soon after loading it"}
    suspect = Checkpoint(run=run[0], step=5, attempt=1, trust=Trust.SUSPECT, bytes=1, committed_at=1.0, **row)
    seeds.store.put_checkpoint(suspect, epoch=seeds.epoch)
    for number, words in enumerate((f"{run[0]}@5", run[1])):
        shown = orch("ckpt", "export", words, tmp_path / f"out-{number}")
        assert shown.code == 0
        assert f"{run[1].name} is SUSPECT: ValueError twice soon" in " ".join(shown.err.split())


def test_export_refuses_what_makes_no_sense(orch: Type, run: tuple[str, Path], tmp_path: Path) -> None:
    assert orch("ckpt", "export", run[0], tmp_path / "out", "--with-optimizer").code == 2
    assert orch("ckpt", "export", f"{run[0]}@77", tmp_path / "out").code == 3
    (tmp_path / "mine.yaml").write_text("a: 1\n")
    said = orch("ckpt", "export", run[0], tmp_path / "mine.yaml")
    assert (said.code, "mine.yaml must be a folder, but is a file" in said.err) == (4, True)


@pytest.mark.parametrize("name", ["out.pt", "model.safetensors", "a.b/x.pth"])
def test_the_name_of_a_file_makes_no_folder(orch: Type, run: tuple[str, Path], tmp_path: Path, name: str) -> None:
    said = orch("ckpt", "export", run[0], tmp_path / name, "--to", "torch")
    assert said.code == 2
    assert f"{tmp_path / name} looks like a file name, but an export is a folder" in said.err
    folder = (tmp_path / name).with_suffix("")
    assert f"name a folder: {folder}\n" in said.err
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("verb", ["export", "verify", "diff"])
def test_a_checkpoint_is_pinned_while_it_is_read(
    orch: Type, run: tuple[str, Path], tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from checkpointing.storage.backends import LocalStorage

    opened, garbage = LocalStorage.open, run[1].parent / "pins"
    seen: list[list[str]] = []

    def look(self: LocalStorage, name: str) -> Any:
        if name.endswith(".distcp"):
            seen.append([pin.name.partition("@")[0] for pin in garbage.iterdir()])
        return opened(self, name)

    monkeypatch.setattr(LocalStorage, "open", look)
    report = verification._report
    monkeypatch.setattr(
        verification,
        "_report",
        lambda *given: (seen.append([pin.name.partition("@")[0] for pin in garbage.iterdir()]), report(*given))[1],
    )
    words = {"export": [run[0], tmp_path / "out"], "verify": [run[0]], "diff": [run[0], run[0]]}[verb]
    assert orch("ckpt", verb, *words).code == 0
    assert all({*names} == {run[1].name} for names in seen)
    assert verb == "diff" or seen, "equal fingerprints are not read"
    assert not list(garbage.iterdir())
    orch("ckpt", "pin", run[0], "--note", "mine")
    assert orch("ckpt", verb, *words[:-1], *([tmp_path / "two"] if verb == "export" else words[-1:])).code == 0
    assert json.loads((garbage / run[1].name).read_text())["note"] == "mine", "a pin of the user's stays"


@pytest.mark.parametrize("verb", ["export", "verify"])
def test_checkpoint_deleted_while_it_is_read(
    orch: Type, run: tuple[str, Path], tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from checkpointing.storage.backends import LocalStorage
    from orchestrator.run_dirs import reader_pins

    opened = LocalStorage.open

    def delete(self: LocalStorage, name: str) -> Any:
        if name.endswith(".distcp"):
            (run[1] / "COMMIT").unlink(missing_ok=True)
            (run[1] / "__0_0.distcp").unlink(missing_ok=True)
        return opened(self, name)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    def report(*given: Any) -> Any:
        (run[1] / "__0_0.distcp").unlink()
        found = reported(*given)
        (run[1] / "COMMIT").unlink()
        return found

    monkeypatch.setattr(LocalStorage, "open", delete)
    reported = verification._report
    monkeypatch.setattr(verification, "_report", report)
    monkeypatch.setattr(reader_pins, "pin", refuse)  # another user's run
    said = orch("ckpt", verb, run[0], *([tmp_path / "out"] if verb == "export" else []))
    assert (said.code, f"{run[1].name} no longer exists: it is being deleted" in said.err) == (3, True), said.err
    assert f"`orch ckpt ls {run[0]}` lists what is left" in said.err
    assert not (tmp_path / "out").exists()


def settings(tmp_path: Path) -> list[str]:
    (tmp_path / "text").mkdir(exist_ok=True)
    (tmp_path / "text" / "a.txt").write_text("to be or not to be " * 100)
    return [f"cluster.root={tmp_path / 'made'}", "cluster.kind=local", f"data.text=[{tmp_path / 'text'}]"]


def test_import_lists_every_mismatch(orch: Type, run: tuple[str, Path], tmp_path: Path) -> None:
    orch("ckpt", "export", run[0], tmp_path / "hf")
    config = settings(tmp_path)
    bad = orch("ckpt", "import", tmp_path / "hf", "tiny-gpt", *config)
    assert bad.code == 2
    assert "its hidden_size is 32, model.dim is" in bad.err
    (line,) = [line for line in bad.err.splitlines() if line.strip().startswith("add ")]
    good = orch("ckpt", "import", tmp_path / "hf", "tiny-gpt", *config, *line.split()[1:], "--dry-run", "--json")
    assert good.code == 0, good.err
    assert (good.data["run"], good.data["step"], good.data["optimizer"]) == (None, 0, False)
    assert not list((tmp_path / "made").glob("*-1")), "a dry run writes nothing"
    assert not list((tmp_path / "made" / f".imports-{os.geteuid()}").iterdir()), "a refusal leaves nothing"


def test_import_into_a_run_that_would_not_see_it(orch: Type, run: tuple[str, Path], tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    config = [*settings(tmp_path), f"checkpoint.tiers=[{{path: {tmp_path / 'elsewhere'}}}]"]
    bad = orch("ckpt", "import", tmp_path / "model.safetensors", "tiny-gpt", *config)
    assert (bad.code, "checkpoint.tiers has no `run`" in bad.err) == (2, True), bad.err


def test_import_without_weights(
    orch: Type, run: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = orch("ckpt", "import", tmp_path, "tiny-gpt", *settings(tmp_path))
    assert (empty.code, "has no weights: no *.safetensors file, and no checkpoint.pt" in empty.err) == (3, True)
    own = orch("ckpt", "import", run[1], "tiny-gpt", *settings(tmp_path))
    assert (own.code, f"  orch submit --from {run[1]}   (" in own.err) == (2, True), own.err
    url = orch("ckpt", "import", "https://hub/x", "tiny-gpt", *settings(tmp_path))
    assert (url.code, "\n  https://hub/x\n" in url.err) == (2, True), url.err
    monkeypatch.setenv("HOME", str(tmp_path))
    assert orch("ckpt", "export", run[0], "~/out").code == 0
    assert (tmp_path / "out" / "model.safetensors").exists()
    fits = orch("ckpt", "import", "~/out", "tiny-gpt", *settings(tmp_path), "--dry-run")
    assert "there is nothing" not in fits.err


def test_import_of_nothing_and_of_garbage(orch: Type, tmp_path: Path) -> None:
    assert orch("ckpt", "import", tmp_path / "gone", "tiny-gpt").code == 3
    (tmp_path / "a.safetensors").write_bytes(b"not this")
    bad = orch("ckpt", "import", tmp_path / "a.safetensors", "tiny-gpt", *settings(tmp_path))
    assert (bad.code, "is not a safetensors file" in bad.err) == (7, True)
    (tmp_path / "notes").write_text("these are no weights")
    bad = orch("ckpt", "import", tmp_path / "notes", "tiny-gpt", *settings(tmp_path), "--dry-run")
    assert (bad.code, "notes: is not a torch or safetensors file\n" in bad.err) == (7, True)
    assert bad.err.endswith("or a file made with torch.save(model.state_dict(), FILE)\n")


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_run_folder_is_created_with_its_checkpoint(
    orch: Type, run: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    seen: list[list[Any]] = []

    def no_job(_screen: Any, name: str, _kind: str, **_more: Any) -> tuple[RunView, tuple[str, ...]]:
        seen.append(Catalog(tmp_path / "made" / name / "checkpoints").committed_entries())
        return find_run(name), ()

    monkeypatch.setattr(submit, "_await_job", no_job)
    monkeypatch.setattr(service, "ensure_running", lambda _path, _kind: None)
    more = ["--with-optimizer"] if to == "torch" else []
    assert orch("ckpt", "export", run[0], tmp_path / "out", "--to", to, *more).code == 0
    config = [*settings(tmp_path), *MODEL]
    made = orch("ckpt", "import", tmp_path / "out", "tiny-gpt", "-n", "tuned", *config, "--json")
    assert made.code == 0, made.err
    ((entry,),) = seen
    assert (made.data["run"], made.data["checkpoint"]) == ("tuned-1", entry.name)
    assert (entry.attempt, entry.step, entry.path.parent.parent.name) == (0, 5 if to == "torch" else 0, "tuned-1")
    assert verify(entry.path, 2).ok
    assert not list((tmp_path / "made" / f".imports-{os.geteuid()}").iterdir())
    assert orch("show", "tuned-1", "--json").data["imported"]["source"] == str(tmp_path / "out")
    how = "and its optimizer state" if to == "torch" else "with a fresh optimizer"
    assert how in orch("show", "tuned-1").out


def test_export_into_a_link_to_an_empty_folder(orch: Type, run: tuple[str, Path], tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "scratch")
    done = orch("ckpt", "export", run[0], tmp_path / "out", "--json")
    assert (done.code, done.data["path"]) == (0, str(tmp_path / "out")), done.err
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "scratch" / "model.safetensors").exists()


def test_export_without_a_format_entry(orch: Type, seeds: Seeds, tmp_path: Path) -> None:
    built = build({"model/phase": torch.zeros(4, dtype=torch.complex128)})
    built.extra = {"step": 5, "consumed": 80, "loss": 2.5, "seed": 1, "fingerprint": None}
    folder = built.write(tmp_path / "odd", step=5)
    bad = orch("ckpt", "export", folder, tmp_path / "out")
    assert (bad.code, "complex128, which safetensors does not support" in bad.err) == (7, True), bad.err
    assert not (tmp_path / "out").exists()


def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_job(_screen: Any, name: str, _kind: str, **_more: Any) -> tuple[RunView, tuple[str, ...]]:
        return find_run(name), ()

    monkeypatch.setattr(submit, "_await_job", no_job)
    monkeypatch.setattr(service, "ensure_running", lambda _path, _kind: None)


def test_submit_with_weights_only(
    orch: Type, run: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_launch(monkeypatch)
    other = ["train.seed=9", "train.batch_size=4", "train.seq_len=16"]
    words = ["--from", f"{run[0]}@5", "--weights-only", *settings(tmp_path), *other]
    assert orch("submit", "tiny-gpt", *words, *MODEL, "--dry-run").code == 0
    assert not list((tmp_path / "made").glob("tiny*")), "a dry run writes nothing"
    made = orch("submit", "tiny-gpt", *words, *MODEL, "-n", "tuned", "--json")
    assert made.code == 0, made.err
    (entry,) = Catalog(tmp_path / "made" / made.data["run"] / "checkpoints").committed_entries()
    assert (entry.step, entry.attempt) == (0, 0)
    assert verify(entry.path, 2).ok
    shown = orch("show", made.data["run"], "--json").data["imported"]
    assert (shown["source"], shown["step"], shown["optimizer"]) == (f"{run[0]}@5", 0, False)
    assert not list((tmp_path / "made" / f".imports-{os.geteuid()}").iterdir())


def test_weights_alone_must_fit_and_come_from_somewhere(orch: Type, run: tuple[str, Path], tmp_path: Path) -> None:
    bad = orch("submit", "tiny-gpt", "--from", f"{run[0]}@5", "--weights-only", *settings(tmp_path))
    assert bad.code == 2
    assert "the weights do not fit: " in bad.err
    assert f"  {run[0]}@5" in bad.err
    assert not list((tmp_path / "made" / f".imports-{os.geteuid()}").iterdir()), "a refusal leaves nothing"
    alone = orch("submit", "tiny-gpt", "--weights-only", *settings(tmp_path))
    assert (alone.code, "add --from RUN@STEP" in alone.err) == (2, True)


def test_damaged_weights_begin_no_run(orch: Type, run: tuple[str, Path], tmp_path: Path) -> None:
    victim = run[1] / "__0_0.distcp"
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(bytes(data))
    words = [*settings(tmp_path), *MODEL, "train.seq_len=16"]
    bad = orch("submit", "tiny-gpt", "--from", f"{run[0]}@5", "--weights-only", *words)
    assert (bad.code, "__0_0.distcp chunk 0" in bad.err) == (7, True), bad.err
    assert not list((tmp_path / "made").glob("tiny*"))
