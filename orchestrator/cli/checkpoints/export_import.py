"""`orch ckpt export` and `orch ckpt import`: write weights for other programs, and start runs from weights."""

import json
import os
import shlex
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import click

from checkpointing.errors import CheckpointError
from checkpointing.format.commit import parse_name
from orchestrator.cli.access.registry import open_store
from orchestrator.cli.checkpoints import verify
from orchestrator.cli.checkpoints.target import find_one, find_registered, is_export, kept_while_read, warn_if_doubted
from orchestrator.cli.config import OVERRIDES
from orchestrator.cli.runs.branch import bring, staging_folder
from orchestrator.cli.terminal.argument_types import ClusterKind, NonEmptyPath
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Screen, count, size
from orchestrator.cli.terminal.streams import writing_to
from orchestrator.errors import CheckpointInvalid, ConfigError, NotFound, OrchError, Precondition

_PROVENANCE = "orch.json"
"""Provenance file of an export."""
_FILE_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".tar", ".zip", ".gguf")
"""Suffixes that an export folder cannot have, because it would look like a file."""


EXPORT_JSON = "{checkpoint, step, run, path, files: [{name, bytes}], bytes, tensors, compared, converted}"


@click.command("export", cls=Verb, json_data=EXPORT_JSON)
@click.argument("target", metavar="RUN[@STEP]|FOLDER")
@click.argument("folder", metavar="DIR", type=NonEmptyPath(path_type=Path))
@click.option(
    "--to", type=click.Choice(["safetensors", "torch", "peft"]), default="safetensors", show_default=True,
    help="safetensors: loadable by `transformers`. torch: one file for torch.load. peft: LoRA adapters alone.",
)  # fmt: skip
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="Convert the model's floating-point values.")
@click.option("--with-optimizer", is_flag=True, help="Also write the optimizer's state (with --to torch).")
@click.pass_obj
def export(
    screen: Screen, target: str, folder: Path, to: str, dtype: str | None, with_optimizer: bool
) -> None:  # fmt: skip
    """Write a checkpoint's model into DIR, which must be new or empty, as files that other programs read.

    Every byte is verified as it is read; the written files are read back and compared. DIR appears complete or not at
    all. A SUSPECT checkpoint is exported with a warning. Tied weights are written under each of their names. The
    vocabulary keeps its padding to a multiple of 64.

    safetensors: for the built-in model and `workload: hf`, a folder for `transformers` (LoRA is merged into its base);
    for any other model, its own names. torch: `checkpoint.pt` for `torch.load(weights_only=True)`, with `model`,
    `step`, `extra`, and with --with-optimizer `optimizer`. peft: LoRA adapters alone, for `PeftModel`.
    """
    if with_optimizer and to != "torch":
        raise ConfigError("safetensors cannot hold the optimizer state", where="--with-optimizer", hint="--to torch")
    folder = folder.expanduser()
    _require_folder(folder)
    before = (folder / _PROVENANCE).exists()
    screen.if_interrupted = lambda: (
        f"interrupted: {folder} is {'complete' if (folder / _PROVENANCE).exists() and not before else 'not written'}"
    )
    chosen = find_one(target, screen.warn)
    with suppress(OrchError), open_store(readonly=True) as store:  # a folder can be exported without a registry
        warn_if_doubted(screen.warn, find_registered(store, chosen)[1])
    verify.prepare()
    from trainer.models.checkpoint_export import ExportRequest
    from trainer.models.checkpoint_export import export as write

    order = ExportRequest(
        to=to, folder=folder.resolve(), dtype=dtype, with_optimizer=with_optimizer, run=chosen.run, config=chosen.config
    )
    try:
        with kept_while_read(chosen), screen.bar(f"step {chosen.step}") as meter, writing_to(order.folder):
            done, provenance = write(chosen.storage, chosen.name, order, meter)
    except CheckpointError as error:
        raise CheckpointInvalid(
            f"nothing was exported: {error}", where=chosen.path, hint=f"orch ckpt verify {chosen.path} --level 4"
        ) from error
    except FileExistsError as error:
        raise Precondition(
            "the folder is not empty", where=str(folder), hint="name a new folder, or empty this folder first"
        ) from error
    _show_export(screen, chosen, folder, done, provenance, built_in=order.has_built_in_model)


def _require_folder(folder: Path) -> None:
    """Raise Precondition if `folder` is an existing file, ConfigError if its name looks like a file's."""
    if folder.is_dir():
        return
    if folder.exists():
        raise Precondition(f"{folder} must be a folder, but is a file", hint="name a new folder")
    if folder.suffix in _FILE_SUFFIXES:
        hint = f"name a folder: {shlex.quote(str(folder.with_suffix('')))}"
        raise ConfigError(f"{folder} looks like a file name, but an export is a folder", where="DIR", hint=hint)


def _show_export(
    screen: Screen, chosen: Any, folder: Path, done: Any, provenance: dict[str, Any], *, built_in: bool
) -> None:
    converted = sum(entry["converted"] for entry in provenance["tensors"].values())
    tensors = len(done.fingerprints)
    answer = {
        "checkpoint": chosen.name, "step": chosen.step, "run": chosen.run, "path": str(folder.absolute()),
        "files": [{"name": name, "bytes": length} for name, length in done.files.items()], "bytes": done.size,
        "tensors": tensors, "compared": done.compared, "converted": converted,
    }  # fmt: skip
    written = os.listdir(folder)
    if not {"config.json", "adapter_config.json"} & set(written) and provenance["tensors"] and not built_in:
        screen.warn("no_config", "no config.json: orch writes it for the built-in model, and workload hf from a folder")
    if screen.json:
        screen.data("ckpt.export", answer)
        return
    files = f"{len(done.files)} file{'' if len(done.files) == 1 else 's'}"
    saved = f"; {count(done.compared)} match the fingerprints recorded when it was saved" if done.compared else ""
    screen.say(f"{chosen.name} -> {folder}: {size(done.size)} in {files}")
    screen.say(f"  {count(tensors)} tensors read back; their values match the checkpoint{saved}")
    if converted:
        screen.say(f"  {count(converted)} tensors were converted; values may be rounded")


IMPORT_JSON = """
{source, step, optimizer, tensors, compared, notes, checkpoint, run, attempt, job_id, cluster, run_dir, config_digest}
"""


@click.command("import", cls=Verb, json_data=IMPORT_JSON)
@click.argument("given", metavar="DIR|FILE", type=NonEmptyPath())
@click.argument("preset", metavar="CONFIG")
@OVERRIDES
@click.option("-n", "--name", default=None, help="Name of the run; orch adds a number.")
@click.option("--cluster", type=ClusterKind(), default=None, help="Where to run; overrides cluster.kind.")
@click.option("--weights-only", is_flag=True, help="Skip the optimizer state: start at step 0 with a fresh optimizer.")
@click.option("--no-controller", is_flag=True, help="Start no controller: launch from here and return.")
@click.option("--dry-run", is_flag=True, help="Only check whether the weights fit; write and submit nothing.")
@click.pass_obj
def import_(
    screen: Screen, given: str, preset: str, overrides: tuple[str, ...], name: str | None, cluster: str | None,
    weights_only: bool, no_controller: bool, dry_run: bool,
) -> None:  # fmt: skip
    """Submit a run that begins with the weights in DIR or FILE: from Hugging Face, an export, or a torch file.

    They become the run's first checkpoint, verified like any other. Training starts at step 0 with a fresh optimizer.
    An export that includes the optimizer state continues at its step, but random generators, schedulers, buffers of
    ranks other than the first and the workload's own state start afresh, and data that has a `state_dict` must also
    have a `seek(consumed)`. `orch submit --from` continues bit for bit, even from a checkpoint's folder.

    Names, shapes and dtypes that do not fit are reported one by one, with the override that fixes them (exit code
    2). The exit code is 7 if the files are damaged.
    """
    from orchestrator.cli.runs.submit import launch
    from orchestrator.config.compose import compose  # imports omegaconf: only for verbs that read configurations
    from orchestrator.submission.create_run import RunOrigin, check_beginning

    source = _find_weights(given)

    def open_weights() -> AbstractContextManager[Any]:
        from trainer.models.weights_import import open_source  # torch

        return nullcontext(open_source(source))

    words = [f"cluster.kind={cluster}"] if cluster else []
    words += [f"name={json.dumps(name, ensure_ascii=False)}"] if name else []
    screen.if_interrupted = lambda: "interrupted: no run was created"
    composed = compose(preset, (*overrides, *words), environ=os.environ)
    check_beginning(composed.config, preset)
    launched = None
    with nullcontext() if dry_run else staging_folder(composed.config.cluster) as staging:
        brought = bring(
            screen, composed.config, staging, source=open_weights, where=str(source),
            weights_only=weights_only,
        )  # fmt: skip
        if staging is not None:
            begin = {key: brought[key] for key in ("checkpoint", "source", "step", "optimizer")}
            launched = launch(screen, composed, cluster, no_controller=no_controller, origin=RunOrigin(imported=begin))
    _show_import(screen, brought, launched)


def _find_weights(given: str) -> Path:
    """Return the folder or file with weights. Raises NotFound, ConfigError for a URL or an orch checkpoint."""
    if "://" in given:
        hint = "download them first, then name the folder"
        raise ConfigError("weights must be in a folder or file on this machine", where=given, hint=hint)
    place = Path(given).expanduser().absolute()
    hint = "name a folder or a file with weights"
    if not place.exists():
        raise NotFound(f"{given} does not exist", hint=hint)
    if place.is_dir() and parse_name(place.name) is not None:
        hint = f"orch submit --from {shlex.quote(str(place))}   (--weights-only: a fresh optimizer)"
        raise ConfigError(f"{given} is an orch checkpoint, which cannot be imported", where=str(place), hint=hint)
    if place.is_dir() and not is_export(place):
        what = f"{given} has no weights: no *.safetensors file, and no checkpoint.pt"
        raise NotFound(what, where=str(place), hint=hint)
    return place


def _show_import(screen: Screen, brought: dict[str, Any], launched: dict[str, Any] | None) -> None:
    name = Path(brought["checkpoint"]).name if brought["checkpoint"] else None
    if screen.json:
        screen.data("ckpt.import", {**brought, "checkpoint": name, **(launched or {"run": None})})
        return
    how = "the exported optimizer state" if brought["optimizer"] else "a fresh optimizer"
    begins = f"step {brought['step']} with {how}"
    restart = "random generators, schedulers and a workload's own state start afresh; "
    restart += "`orch submit --from RUN@STEP` keeps them"
    for note in (*brought["notes"], *([restart] if brought["optimizer"] else [])):
        screen.note(f"  {note}")
    proof = f"; {count(brought['compared'])} match the fingerprints recorded at export" if brought["compared"] else ""
    if launched is None:
        screen.say(f"{brought['source']} fits: {count(brought['tensors'])} tensors; training would begin at {begins}")
        return
    job = f"job {launched['job_id']}" if launched["job_id"] else "no job yet"
    screen.say(f"{launched['run']} submitted ({launched['cluster']}, {job}); it begins at {begins}")
    screen.say(f"  {name}: {count(brought['tensors'])} tensors from {brought['source']}{proof}")
    screen.note(f"  status   orch status {launched['run']}\n  wait     orch wait {launched['run']} --follow")
