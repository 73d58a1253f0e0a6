"""Asking a rank's server: answers whole, chunked, too long, malformed, late, or none."""

import asyncio
import json
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from trainer.agent.flight import recorder

T = TypeVar("T")
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
DUMP = {"entries": [{"collective_seq_id": 3, "process_group": ["0", "default_pg"], "profiling_name": "gloo:barrier"}]}


@pytest.fixture
def path() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="orch-") as folder:
        yield f"{folder}/0.1"


class Server:
    """Stands for torch's worker server: gives each handler's answer (None: silence), 404 to others."""

    def __init__(self, answers: dict[str, bytes | None]) -> None:
        self._request_handlers = answers
        self.heard: list[bytes] = []
        self._writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        head = await reader.readuntil(b"\r\n\r\n")
        self.heard.append(head)
        answer = self._request_handlers.get(head.split()[1].decode().removeprefix("/handler/"), NOT_FOUND)
        if answer is not None:
            writer.write(answer)
            writer.close()

    async def during(self, path: str, question: Coroutine[Any, Any, T]) -> T:
        try:
            async with await asyncio.start_unix_server(self.serve, path):
                return await question
        finally:
            for writer in self._writers:
                writer.transport.abort()
            await asyncio.sleep(0.01)


def asked(path: str, answer: bytes | None, seconds: float = 5.0) -> bytes | None:
    """What `ask` makes of this answer."""
    return asyncio.run(Server({"ping": answer}).during(path, recorder.ask(path, "ping", seconds)))


def whole(dump: object) -> bytes:
    body = json.dumps(dump).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def test_an_answer_of_known_length(path: str) -> None:
    assert asked(path, b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\npong and more") == b"pong"


def test_the_question_is_what_torch_understands(path: str) -> None:
    server = Server({"ping": whole("pong")})
    asyncio.run(server.during(path, recorder.ask(path, "ping", 5.0)))
    assert server.heard[0].startswith(b"POST /handler/ping HTTP/1.1\r\n")


def test_an_answer_in_chunks(path: str) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert asked(path, head + b"4\r\npong\r\nA;x=y\r\n and again\r\n0\r\n\r\n") == b"pong and again"


def test_an_answer_until_the_end(path: str) -> None:
    assert asked(path, b"HTTP/1.1 200 OK\r\n\r\npong") == b"pong"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 2\r\n\r\nno",
        b"HTTP/1.1 200 OK\r\nContent-Length: 400\r\n\r\ncut off",
        b"HTTP/1.1 200 OK\r\nContent-Length: -4\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFF\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnot a number\r\n",
        b"garbage\r\n\r\n",
        b"x" * 200_000,
        b"",
    ],
)
def test_what_is_no_answer_is_none(path: str, answer: bytes) -> None:
    assert asked(path, answer) is None


def test_a_server_without_such_a_recorder_says_so(path: str) -> None:
    assert asked(path, b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno") == recorder.NOTHING


def test_silence_has_an_end(path: str) -> None:
    began = time.monotonic()
    assert asked(path, None, seconds=0.2) is None
    assert time.monotonic() - began < 3


@pytest.mark.parametrize("where", ["", "/nowhere/at/all", "/" + "x" * 300])
def test_where_nobody_listens_there_is_no_answer(where: str) -> None:
    assert asyncio.run(recorder.ask(where, "ping", 1.0)) is None


def test_a_record_takes_its_groups_from_beside_the_socket(path: str) -> None:
    Path(f"{path}.groups").write_text(json.dumps({"0": {"name": "0", "desc": "default_pg", "runs": [[0, 6, 2]]}}))
    server = Server({"fr_trace_json": whole(DUMP)})
    found, silent = asyncio.run(server.during(path, recorder.flights({4: path, 5: path + "5"}, 2.0)))
    assert [flight.rank for flight in found] == [4]
    assert found[0].groups["0"].ranks == (0, 2, 4, 6)
    assert silent == [5]


def test_on_gpus_there_are_two_recorders(path: str) -> None:
    """NCCL's own, and that of gloo, which numbers the collectives of the same group by itself."""
    entry = {"collective_seq_id": 9, "process_group": ["0", "default_pg"], "profiling_name": "nccl:all_reduce"}
    nccl = {"entries": [entry], "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}}
    server = Server({"fr_trace_json": whole(DUMP), "dump_nccl_trace_json": whole(nccl)})
    flight = asyncio.run(server.during(path, recorder.flight(1, path, 2.0)))
    assert flight is not None
    assert {key: group.entered for key, group in flight.groups.items()} == {"0": 9, "0 on the host": 3}
    assert flight.groups["0"].ranks == (0, 1)


def test_without_the_record_of_its_gpu_a_rank_has_not_answered(path: str) -> None:
    """That of its host, taken for that of its GPU, would say that it never entered what its peers wait in."""
    server = Server({"fr_trace_json": whole(DUMP), "dump_nccl_trace_json": None})
    found, silent = asyncio.run(server.during(path, recorder.flights({1: path}, 0.3)))
    assert (found, silent) == ([], [1])


def test_the_folder_is_private_and_goes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sockets = recorder.FlightSockets()
    folder = Path(sockets.path(0, 1)).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    sockets.close()
    assert not folder.exists()
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    sockets = recorder.FlightSockets()
    assert sockets.path(123_456, 999).startswith(f"/tmp{os.sep}orch-")
    sockets.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_process_that_listens_there_is_not_asked() -> None:
    above = Path(tempfile.mkdtemp(prefix="orch-test-"))
    above.chmod(0o777)
    where = above / "socket"
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            os.seteuid(61002)
            try:
                listener.bind(str(where))
                listener.listen()
            finally:
                os.seteuid(0)
            assert asyncio.run(recorder.ask(str(where), "ping", 5.0)) is None
            with listener.accept()[0] as connection:
                assert connection.recv(1000) == b""
    finally:
        shutil.rmtree(above)
