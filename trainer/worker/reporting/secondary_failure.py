"""Secondary failures: exceptions that a rank raises only because it lost the connection to a peer."""

from torch.distributed import DistError

from trainer.protocol.failures.failure_patterns import Meaning, has_meaning
from trainer.worker.startup.rendezvous import PeerLost


def is_secondary_failure(error: BaseException) -> bool:
    """Return whether `error` only reports a dead peer, so that the cause is elsewhere."""
    if isinstance(error, PeerLost):
        return True
    # Only errors of torch's own collectives: a user's ConnectionResetError is a cause.
    if not isinstance(error, DistError) and type(error) is not RuntimeError:
        return False
    return has_meaning(str(error), Meaning.PEER_GONE)
