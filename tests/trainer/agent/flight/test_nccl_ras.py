"""The client of NCCL's RAS, against a server that answers as NCCL 2.28 does."""

import json
import socket
import threading
from typing import Any

import pytest

from trainer.agent.flight.nccl_ras import RasRank, parse_status, query_ras


def member(pid: int, all_reduce: int, **counts: int) -> dict[str, Any]:
    status = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}
    known = {"rank": 0, "host": "10.0.0.1", "pid": pid, "cuda_dev": 0, "nvml_dev": 0, "status": status}
    return {**known, "collective_counts": {"AllReduce": all_reduce, "Broadcast": 0, **counts}}


def missing(pid: int) -> dict[str, Any]:
    status = {"unresponsive": True, "considered_dead": False}
    return {"rank": 3, "host": "10.0.0.1", "pid": pid, "cuda_dev": 3, "nvml_dev": 3, "status": status}


def communicator(ranks: list[dict[str, Any]], absent: list[dict[str, Any]]) -> dict[str, Any]:
    sizes = {"size": len(ranks) + len(absent), "ranks_count": len(ranks), "missing_ranks_count": len(absent)}
    return {"hash": "0x1", "secondary_hash": "0x2:0x3", **sizes, "ranks": ranks, "missing_ranks": absent}


STATUS = {
    "nccl_version": "2.28.7", "cuda_runtime_version": 12090, "cuda_driver_version": 12090,
    "timestamp": "2026-11-28 05:00:00", "communicators_count": 2,
    "communicators": [
        communicator([member(10, 40), member(11, 41), member(12, 41)], [missing(13)]),
        communicator([member(10, 7), member(11, 7, Broadcast=9)], []),
    ],
    "ras": {"collection_time_sec": 0.01, "timeouts_count": 0},
}  # fmt: skip


class Server(threading.Thread):
    """Speaks the protocol of NCCL's RAS: a line for every line, then the status and the end of the stream."""

    def __init__(self, status: bytes, formats: bytes = b"OK\n", silent: int = 0) -> None:
        """The first `silent` connections get no answer."""
        super().__init__(daemon=True)
        self._status, self._formats, self._silent = status, formats, silent
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.lines: list[bytes] = []
        self._kept: list[socket.socket] = []
        self.start()

    def run(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            if self._silent:
                self._silent -= 1
                self._kept.append(link)
            else:
                self._serve(link)

    def _serve(self, link: socket.socket) -> None:
        answers = {b"CLIENT": b"SERVER PROTOCOL 2\n", b"TIMEOUT": b"OK\n", b"SET": self._formats}
        with link, link.makefile("rwb") as stream:
            for line in stream:
                self.lines.append(line)
                if line == b"VERBOSE STATUS\n":
                    stream.write(self._status)
                    return
                stream.write(answers[line.split()[0]])
                stream.flush()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in self._kept:
            link.close()


@pytest.fixture
def server():
    made: list[Server] = []

    def make(*args: Any, **fields: Any) -> Server:
        made.append(Server(*args, **fields))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_each_process_is_shown_where_it_is_furthest_behind(server):
    ras = server(json.dumps(STATUS).encode())
    found = query_ras(30.0, {"NCCL_RAS_ADDR": ras.address})
    assert found == {
        10: RasRank(pid=10, launched=7, most=16),
        11: RasRank(pid=11, launched=41, most=41),
        12: RasRank(pid=12, launched=41, most=41),
        13: RasRank(pid=13, most=41, missing=True),
    }
    assert ras.lines[0] == b"CLIENT PROTOCOL 2\n"
    assert ras.lines[2:] == [b"SET FORMAT json\n", b"VERBOSE STATUS\n"]


def test_a_stopped_process_that_accepts_is_tried_again(server):
    ras = server(json.dumps(STATUS).encode(), silent=1)
    assert 13 in query_ras(3.0, {"NCCL_RAS_ADDR": ras.address})


@pytest.mark.parametrize(
    ("status", "formats"), [(b"{}", b"OK\n"), (b"text", b"OK\n"), (b"", b"ERROR: Unknown command set format json\n")]
)
def test_an_older_version_or_another_program_is_no_witness(server, status, formats):
    assert query_ras(30.0, {"NCCL_RAS_ADDR": server(status, formats).address}) == {}


def test_without_a_server_there_is_no_witness():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    assert query_ras(1.0, {"NCCL_RAS_ADDR": address}) == {}
    assert query_ras(1.0, {"NCCL_RAS_ADDR": "nonsense"}) == {}


def test_a_process_in_no_communicator_is_unknown():
    assert parse_status(json.dumps({**STATUS, "communicators": []}).encode()) == {}
