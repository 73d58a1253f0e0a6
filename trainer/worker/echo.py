"""Telling a cause from its echo: what a rank prints only because a peer went away."""

import re

from torch.distributed import DistError

from trainer.worker.rendezvous import PeerLost

_PEER_GONE = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Read error|Write error|"
    r"Application timeout caused pair closure|Timed out waiting \d+ms for (recv|send)|"
    r"Connection was likely closed|Connection refused|Failed to recv|failed to (recv|send)|"
    r"connectFullMesh failed|client socket has (timed out|failed to connect)|waiting for clients|"
    r"remote process exited|socketProgress|ncclRemoteError|ncclSystemError|NCCL communicator was aborted|"
    r"Some NCCL operations have failed or timed out|wait timeout after \d+ms|Socket Timeout"
)


def is_echo(error: BaseException) -> bool:
    """Whether `error` only says that another process is gone, so that the cause has to be looked for elsewhere."""
    if isinstance(error, PeerLost):
        return True
    # Only what torch's own collectives raise: a user's ConnectionResetError is a cause.
    if not isinstance(error, DistError) and type(error) is not RuntimeError:
        return False
    return bool(_PEER_GONE.search(str(error)))
