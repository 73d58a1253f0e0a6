"""Which exceptions are secondary failures: what a rank raises only because a peer went away."""

from torch.distributed import DistError

from trainer.contract.ranks.peer_loss import PEER_GONE
from trainer.worker.startup.rendezvous import PeerLost


def is_secondary_failure(error: BaseException) -> bool:
    """Whether `error` only says that a peer has died, so that the cause lies elsewhere."""
    if isinstance(error, PeerLost):
        return True
    # Only what torch's own collectives raise: a user's ConnectionResetError is a cause.
    if not isinstance(error, DistError) and type(error) is not RuntimeError:
        return False
    return bool(PEER_GONE.search(str(error)))
