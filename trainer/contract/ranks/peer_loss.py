"""What a program prints only because a peer of it went away."""

import re

PEER_GONE = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Read error|Write error|"
    r"Application timeout caused pair closure|Timed out waiting \d+ms for (recv|send)|"
    r"Connection was likely closed|Connection refused|Failed to recv|failed to (recv|send)|"
    r"connectFullMesh failed|client socket has (timed out|failed to connect)|waiting for clients|"
    r"remote process exited|socketProgress|ncclRemoteError|ncclSystemError|NCCL communicator was aborted|"
    r"Some NCCL operations have failed or timed out|wait timeout after \d+ms|Socket Timeout"
)
"""In messages of torch's own collectives; in other places the same words can be a cause."""
