"""Examination of a checkpoint without a model: bytes, structure, values and origin."""

from checkpointing.engine.audit.audit import AUDITS, AuditShare, audit_checkpoint
from checkpointing.errors import CheckpointError
from checkpointing.format.commit import parse_name, read_commit
from checkpointing.storage.backends import Storage
from checkpointing.verification.verdicts import read_manifest_digest
from checkpointing.verification.verify import Report, read_sealed, verify_checkpoint
from trainer.protocol.restore_test import RestoreTestOrder
from trainer.worker.saved_state.checkpoint_contents import expected_entries


def audit(order: RestoreTestOrder, storage: Storage, share: AuditShare) -> Report:
    """Verify this rank's share of the checkpoint at the order's level; raises OSError unless it exists."""
    require_checkpoint(order, storage)
    if order.level not in AUDITS:
        return verify_checkpoint(storage, order.checkpoint, order.level, choose=share.take_chunks)
    return audit_checkpoint(storage, order.checkpoint, order.level, expect=expected_entries, share=share)


def find_fault(order: RestoreTestOrder, storage: Storage, report: Report) -> str:
    """Return the fault of a checkpoint, from the `report` of all ranks or from its origin; empty if it is sound.

    Raises OSError if the checkpoint is unreadable now, deleted or not visible. None of these proves damage.
    """
    faults = [fault for fault in report.faults if fault.is_damage]
    if report.faults:
        require_checkpoint(order, storage)  # a vanished file system looks like missing files
        if not faults:
            raise OSError(f"{order.place}/{order.checkpoint}: {report.faults[0]}")
        more = len(faults) - 1
        return f"{faults[0]}{f' (and {more} more faults)' if more > 0 else ''}"
    return _origin_fault(order, storage)


def require_checkpoint(order: RestoreTestOrder, storage: Storage) -> None:
    """Raise OSError unless the checkpoint is committed where it should be."""
    try:
        read_commit(storage, order.checkpoint)
    except CheckpointError:
        return  # it exists and is damaged: the verification reports that
    except FileNotFoundError as error:
        if order.checkpoint in storage.list(""):
            files = storage.list(order.checkpoint)
            if len(files) > 1 and "DELETED" not in files:
                return  # only COMMIT is missing: that is damage
        raise OSError(f"{order.place}/{order.checkpoint} is not there: deleted, or not visible on this node") from error


def saving_attempt(order: RestoreTestOrder) -> int:
    """Return the attempt that saved the checkpoint; 0 if the run started from it."""
    parts = parse_name(order.checkpoint)
    return parts.attempt if parts is not None and order.config_digest else 0


def _origin_fault(order: RestoreTestOrder, storage: Storage) -> str:
    """Return the fault of a rewritten manifest, or of a checkpoint saved with another config."""
    digest = read_manifest_digest(storage, order.checkpoint)
    if order.manifest and digest != order.manifest:
        return (
            f"MANIFEST: was made anew: its digest is {digest}, and the registry has kept {order.manifest} since commit"
        )
    manifest, _ = read_sealed(storage, order.checkpoint)
    if manifest is None:
        return ""
    saved_with = manifest.extra.get("config_digest")
    if order.config_digest and saved_with is not None and saved_with != order.config_digest:
        return f"MANIFEST: it was saved with the config {saved_with}, its attempt trained with {order.config_digest}"
    return ""
