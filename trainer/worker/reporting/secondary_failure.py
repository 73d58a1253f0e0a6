"""Which exceptions are secondary failures: what a rank raises only because a peer went away."""

from torch.distributed import DistError

from trainer.contract.failures.failure_patterns import Meaning, error_says
from trainer.worker.startup.rendezvous import PeerLost


def is_secondary_failure(error: BaseException) -> bool:
    """Whether `error` only says that a peer has died, so that the cause lies elsewhere."""
    if isinstance(error, PeerLost):
        return True
    # Only what torch's own collectives raise: a user's ConnectionResetError is a cause.
    if not isinstance(error, DistError) and type(error) is not RuntimeError:
        return False
    return error_says(str(error), Meaning.PEER_GONE)
