"""What a checkpoint of a run must hold besides sound bytes: for `checkpointing.engine.audit.audit`."""

from torch import Tensor

from checkpointing.engine.audit.audit import Expected
from checkpointing.format.manifest import Index, Manifest
from trainer.worker.saved_state.rng_state import generators_fault, origin_fault, rng_name

_GENERATORS = "rng/"
_MODEL, _OPTIMIZER = "model/", "optimizer/"


def expected(manifest: Manifest) -> Expected:
    """Of a checkpoint that a rank of ours has saved (`extra` shows it); of any other one nothing is expected.

    Step counts and data positions are not judged: programs skip steps, update twice, and begin with other state.
    """
    if "config_digest" not in manifest.extra:
        return Expected()
    ranks = manifest.world.get("ranks")

    def unusable(key: str, packed: Tensor) -> str:
        return generators_fault(packed) or origin_fault(packed, key, manifest.step)

    return Expected(
        required=tuple(rng_name(rank) for rank in range(ranks if isinstance(ranks, int) else 0)),
        readable={_GENERATORS: unusable},
        trained=trained_keys,
    )


def trained_keys(index: Index) -> set[str]:
    """Keys of the parameters for which the optimizer holds state: those it has trained."""
    holding = {key.removeprefix(_OPTIMIZER).partition("/")[0] for key in index.tensors if key.startswith(_OPTIMIZER)}
    return {key for key in index.tensors if key.startswith(_MODEL) and key.removeprefix(_MODEL) in holding}
