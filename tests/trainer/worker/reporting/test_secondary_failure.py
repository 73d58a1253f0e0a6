"""A peer's disappearance is an echo; a user's own error never is, whatever it says."""

import pytest
from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

from trainer.worker.reporting.flight_recorder import is_secondary_failure
from trainer.worker.startup.rendezvous import PeerLost


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5"),
        RuntimeError("[pair.cc:547] Read error [127.0.0.1]:4433: Connection reset by peer"),
        RuntimeError("[unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete"),
        RuntimeError("Gloo connectFullMesh failed with [pair.cc:144] no error"),
        DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed."),
        DistNetworkError("The client socket has failed to connect to any network address of (n1, 2)."),
        DistStoreError("Timed out after 301 seconds waiting for clients. 3/4 clients joined."),
        DistBackendError("NCCL error: remote process exited or there was a network error, NCCL version 2.27"),
        PeerLost("the agent went away"),
    ],
)
def test_secondary_failures(error):
    assert is_secondary_failure(error)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError("Connection reset by peer"),
        ValueError("Connection closed by peer"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        DistBackendError("NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)"),
        OSError(28, "No space left on device"),
    ],
)
def test_causes(error):
    assert not is_secondary_failure(error)
