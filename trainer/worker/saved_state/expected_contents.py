"""What a checkpoint of a run must hold besides sound bytes: for `checkpointing.engine.verification.audit`."""

import random

import torch
from torch import Tensor

from checkpointing.engine.state.inspection import TrainedKeys
from checkpointing.engine.verification.audit import Expected
from checkpointing.format.manifest import Manifest
from trainer.contract.config import JobConfig, WorkloadConfig
from trainer.worker.saved_state.checkpoint_contents import rng_name

_STEPS = r"optimizer/.+/step"
_GENERATORS = "rng/"


def expected(manifest: Manifest, config: JobConfig | None) -> Expected:
    """Of a checkpoint that a rank of ours has saved; of any other one (`extra` tells) nothing is expected.

    With the run's configuration, the position in the data of the built-in workload follows from the step.
    """
    if "config_digest" not in manifest.extra:
        return Expected()
    facts: dict[str, object] = {"step": manifest.step}
    if config is not None and config.workload.target == WorkloadConfig().target and not config.command:
        left_out = manifest.extra.get("left_out", 0)
        batches = manifest.step + (left_out if isinstance(left_out, int) else 0)
        facts["consumed"] = batches * config.train.batch_size
    ranks = manifest.world.get("ranks")
    return Expected(
        facts=facts,
        counts=("consumed",),
        steps=_STEPS,
        required=tuple(rng_name(rank) for rank in range(ranks if isinstance(ranks, int) else 0)),
        readable={_GENERATORS: generators_fault},
        finite=TrainedKeys().prefixes,
    )


def generators_fault(packed: Tensor) -> str:
    """What keeps a row of `state.pack_rng` from being taken up again; nothing when it can be. Touches no generator."""
    try:
        parts = _parts(packed)
        if len(parts) < 3:
            return f"holds {len(parts)} of the 3 states of generators"
        torch.Generator().set_state(parts[0])
        numbers = tuple(parts[1].view(torch.int64).tolist())
        random.Random().setstate((3, numbers, None))
        parts[2].view(torch.float64).item()
    except (RuntimeError, ValueError, TypeError) as error:
        return f"cannot be taken up by a generator: {error}"
    return ""


def _parts(packed: Tensor) -> list[Tensor]:
    """As `state.unpack_rng` reads them: a length of 8 bytes, then so many bytes; a length of 0 ends them."""
    if packed.dtype != torch.uint8 or packed.dim() != 1:
        raise ValueError(f"it is {packed.dtype} of shape {tuple(packed.shape)}, not a row of bytes")
    parts, place = [], 0
    while place + 8 <= len(packed) and (length := int(packed[place : place + 8].clone().view(torch.int64))):
        if not 0 < length <= len(packed) - place - 8:
            raise ValueError(f"it ends before the {length} bytes of a part")
        parts.append(packed[place + 8 : place + 8 + length].clone())
        place += 8 + length
    return parts
