"""A process outside the job cannot pose as a peer of a rank."""

import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tests.warm_root import WarmChild, start_warm
from trainer.protocol.messages.ranks import FROM_RANK, RendezvousStore, receive_message, send_message


@contextmanager
def started(*arguments: str, descriptors: tuple[int, ...] = ()) -> Iterator[WarmChild]:
    as_ranks_do = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_GLOO_LAZY_INIT": "1"}
    process = start_warm(
        "tests.trainer.worker.startup.hostile_program:main", arguments, environ={**os.environ, **as_ranks_do},
        descriptors=descriptors,
    )  # fmt: skip
    try:
        yield process
    except BaseException:
        os.kill(process.pid, signal.SIGKILL)
        raise
    finally:
        process.communicate()


def reaches(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.fixture(scope="module")
def attack(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    canary = tmp_path_factory.mktemp("hostile") / "canary"
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(300)
    with ours, started("victim", descriptors=(theirs.fileno(),)):
        theirs.close()
        store = receive_message(ours, FROM_RANK)
        assert isinstance(store, RendezvousStore)
        elsewhere = reaches("127.0.0.2", store.port)
        with started("stranger", str(store.port), str(canary)) as stranger:
            # The stranger was faster than rank 0, so the honest agent passes on the stranger's store.
            send_message(ours, replace(store, port=int(stranger.stdout.readline())))
            found = json.loads(ours.recv(65536))
    return {"store": store, "elsewhere": elsewhere, "ran": canary.exists(), "found": found}


def test_nothing_that_a_stranger_sends_is_run(attack: dict[str, object]) -> None:
    assert not attack["ran"], attack["found"]


@pytest.mark.parametrize("exchange", ["gather", "all_gather", "broadcast", "scatter"])
@pytest.mark.parametrize("number", [0, 1], ids=["a pickle", "forged JSON"])
def test_what_a_stranger_sends_is_refused_by_name(attack: dict[str, object], exchange: str, number: int) -> None:
    found = attack["found"]
    assert isinstance(found, dict)
    assert found[f"{exchange} {number}"].startswith("UnauthenticatedPeer: "), found


def test_the_store_is_reached_at_the_address_of_the_run_alone(attack: dict[str, object]) -> None:
    assert attack["elsewhere"] is False
