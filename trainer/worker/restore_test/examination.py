"""What one rank finds out about a checkpoint without a model: bytes, structure, values, and where it comes from."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from checkpointing.engine.restore.metadata_reader import read_index
from checkpointing.engine.verification.audit import AUDITS, audit_in
from checkpointing.errors import CheckpointError
from checkpointing.format.commit import parse_name, read_commit
from checkpointing.format.manifest import Manifest
from checkpointing.storage.backends import Storage
from checkpointing.verification.verdicts import manifest_of
from checkpointing.verification.verify import Report, read_sealed, verify_in
from trainer.contract.config import JobConfig, load
from trainer.contract.restore_test import RestoreTest
from trainer.contract.run_dir import RunDir
from trainer.worker.saved_state.expected_contents import expected

_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Examined:
    """What was found; `fault` is empty for a checkpoint with which nothing is wrong so far."""

    fault: str
    notes: tuple[str, ...]
    bytes: int
    seconds: float


def examine(order: RestoreTest, storage: Storage, tensors: Mapping[str, Tensor]) -> Examined:
    """Verify the checkpoint at the level of the order; `tensors` are those of a model that was just built.

    Raises OSError when it cannot be read now, or is not there (any more): that is no fault of the checkpoint.
    """
    started = time.monotonic()
    require_there(order, storage)
    config = _config(order)
    report = _report(order, storage, config)
    faults = [fault for fault in report.faults if fault.is_damage]
    if report.faults:
        require_there(order, storage)  # a file system that went away looks like files that are gone
        if not faults:
            raise OSError(f"{order.place}/{order.checkpoint}: {report.faults[0]}")
    more = len(faults) - 1
    fault = f"{faults[0]}{f' (and {more} more faults)' if more > 0 else ''}" if faults else ""
    return Examined(
        fault=fault or _origin_fault(order, storage) or _misfit(order, storage, tensors),
        notes=report.notes,
        bytes=report.bytes,
        seconds=time.monotonic() - started,
    )


def require_there(order: RestoreTest, storage: Storage) -> None:
    """Raise OSError unless the checkpoint is committed where it should be."""
    try:
        read_commit(storage, order.checkpoint)
    except CheckpointError:
        return  # it is there, and damaged: the verification says so
    except FileNotFoundError as error:
        if order.checkpoint in storage.list(""):
            files = storage.list(order.checkpoint)
            if len(files) > 1 and "DELETED" not in files:
                return  # COMMIT alone is gone: that is damage
        raise OSError(f"{order.place}/{order.checkpoint} is not there: deleted, or not visible on this node") from error


def _config(order: RestoreTest) -> JobConfig | None:
    """The config that the checkpoint was saved with; None when the run's folder cannot be read here."""
    try:
        return load(RunDir(Path(order.run_dir)), saving_attempt(order))
    except (OSError, ValueError):
        return None


def saving_attempt(order: RestoreTest) -> int:
    """The attempt of the run that saved the checkpoint; 0 for one that the run began with."""
    parts = parse_name(order.checkpoint)
    return parts.attempt if parts is not None and order.config_digest else 0


def _report(order: RestoreTest, storage: Storage, config: JobConfig | None) -> Report:
    if order.level not in AUDITS:
        return verify_in(storage, order.checkpoint, order.level)
    return audit_in(storage, order.checkpoint, order.level, expect=lambda manifest: expected(manifest, config))


def _origin_fault(order: RestoreTest, storage: Storage) -> str:
    """A manifest that was made anew, or a checkpoint that another config has saved."""
    digest = manifest_of(storage, order.checkpoint)
    if order.manifest and digest != order.manifest:
        return (
            f"MANIFEST: was made anew: its digest is {digest}, and the registry has kept {order.manifest} since commit"
        )
    manifest, _ = read_sealed(storage, order.checkpoint)
    if manifest is None:
        return ""
    if manifest.step != order.step:
        return f"MANIFEST: is of step {manifest.step}, the checkpoint of step {order.step}"
    saved_with = manifest.extra.get("config_digest")
    if order.config_digest and saved_with is not None and saved_with != order.config_digest:
        return f"MANIFEST: it was saved with the config {saved_with}, its attempt trained with {order.config_digest}"
    return ""


def _misfit(order: RestoreTest, storage: Storage, tensors: Mapping[str, Tensor]) -> str:
    """Tensors of the model that the checkpoint does not have, or has with another shape or type."""
    manifest: Manifest | None
    manifest, _ = read_sealed(storage, order.checkpoint)
    if manifest is None:
        return ""
    saved = read_index(storage, manifest).tensors
    wrong = []
    for key, tensor in tensors.items():
        if not key.startswith("model/"):
            continue
        if key not in saved:
            wrong.append(f"there is no tensor {key}")
        elif tuple(saved[key].shape) != tuple(tensor.shape):
            wrong.append(f"{key} has shape {tuple(saved[key].shape)}, the model's has {tuple(tensor.shape)}")
        elif saved[key].dtype != str(tensor.dtype).removeprefix("torch."):
            wrong.append(f"{key} is {saved[key].dtype}, the model's is {str(tensor.dtype).removeprefix('torch.')}")
    more = f" (and {len(wrong) - _NAMED} more)" if len(wrong) > _NAMED else ""
    return "; ".join(wrong[:_NAMED]) + more
