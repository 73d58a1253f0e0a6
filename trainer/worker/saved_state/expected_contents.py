"""What a checkpoint of a run must hold besides sound bytes: for `checkpointing.engine.verification.audit`."""

from torch import Tensor

from checkpointing.engine.state.inspection import TrainedKeys
from checkpointing.engine.verification.audit import Expected
from checkpointing.format.manifest import Manifest
from trainer.contract.config import JobConfig
from trainer.worker.saved_state.rng_state import generators_fault, origin_fault, rng_name

_STEPS = r"optimizer/.+/step"
_GENERATORS = "rng/"


def expected(manifest: Manifest, config: JobConfig | None) -> Expected:
    """Of a checkpoint that a rank of ours has saved (`extra` shows it); of any other one nothing is expected.

    With the run's configuration, the position in the data of the built-in workload follows from the step.
    """
    if "config_digest" not in manifest.extra:
        return Expected()
    facts: dict[str, object] = {"step": manifest.step}
    if config is not None and config.trains_built_in_workload:
        left_out = manifest.extra.get("left_out", 0)
        batches = manifest.step + (left_out if isinstance(left_out, int) else 0)
        facts["consumed"] = batches * config.train.batch_size
    ranks, loss_scale = manifest.world.get("ranks"), manifest.extra.get("loss_scale")
    overflows = loss_scale.get("overflows", 0) if isinstance(loss_scale, dict) else 0

    def unusable(key: str, packed: Tensor) -> str:
        return generators_fault(packed) or origin_fault(packed, key, manifest.step)

    return Expected(
        facts=facts,
        counts=("consumed",),
        steps=_STEPS,
        left_out=overflows if isinstance(overflows, int) else 0,
        required=tuple(rng_name(rank) for rank in range(ranks if isinstance(ranks, int) else 0)),
        readable={_GENERATORS: unusable},
        finite=TrainedKeys().prefixes,
    )
