"""Asking a rank's server: answers whole, chunked, too long, malformed, late, or none."""

import asyncio
import json
import os
import pickle
import pickletools
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.agent.flight.test_flight_record import call, history
from tests.warm_programs import WarmPrograms
from trainer.agent.flight import recorder
from trainer.agent.flight.flight_record import WIRE, parse
from trainer.agent.flight.recorder import load_plain_values, records_of_dead_ranks
from trainer.protocol.run_dir import AttemptDir, RunDir

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


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"Content-Length: 4\r\n\r\npong and more", b"pong"),
        (b"Transfer-Encoding: chunked\r\n\r\n4\r\npong\r\nA;x=y\r\n and again\r\n0\r\n\r\n", b"pong and again"),
        (b"\r\npong", b"pong"),
    ],
    ids=["of known length", "in chunks", "until the end"],
)
def test_an_answer_is_read(path: str, answer: bytes, body: bytes) -> None:
    assert asked(path, b"HTTP/1.1 200 OK\r\n" + answer) == body


def test_the_question_is_what_torch_understands(path: str) -> None:
    server = Server({"ping": whole("pong")})
    asyncio.run(server.during(path, recorder.ask(path, "ping", 5.0)))
    assert server.heard[0].startswith(b"POST /handler/ping HTTP/1.1\r\n")


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
    entry = {"collective_seq_id": 9, "process_group": ["0", "default_pg"], "profiling_name": "nccl:all_reduce"}
    nccl = {"entries": [entry], "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}}
    server = Server({"fr_trace_json": whole(DUMP), "dump_nccl_trace_json": whole(nccl)})
    flight = asyncio.run(server.during(path, recorder.flight(1, path, 2.0)))
    assert {key: group.entered for key, group in flight.groups.items()} == {"0": 9, "0 on the host": 3}
    assert flight.groups["0"].ranks == (0, 1)


def test_without_the_record_of_its_gpu_a_rank_has_not_answered(path: str) -> None:
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


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5)
    | st.tuples(inner, inner) | st.tuples(inner, inner, inner, inner),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=40)
@given(plain, st.integers(0, 5))
def test_plain_values_are_read_as_pickle_reads_them(value: Any, protocol: int) -> None:
    assert load_plain_values(pickle.dumps(value, protocol)) == value


class Evil:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/never-made",)


EVIL = [
    pickle.dumps({"entries": [Evil()]}, 2),
    pickle.dumps({"entries": [Evil()]}, 5),
    b"cos\nsystem\n(S'true'\ntR.",
    b"(S'true'\nios\nsystem\n.",
    pickle.dumps(pytest.raises, 4),  # a name to import
    pickle.dumps({1, 2}, 4),
    pickle.dumps(b"bytes", 4),
    b"\x80\x02P1\n.",  # persistent id
    b"\x80\x02\x82\x01.",  # extension registry
]


@pytest.mark.parametrize("data", EVIL, ids=range(len(EVIL)))
def test_what_does_more_than_hold_values_is_refused(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "system", lambda command: pytest.fail(f"ran {command}"))
    with pytest.raises(ValueError, match="pickle"):
        load_plain_values(data)


@pytest.mark.parametrize(
    "data", [b"", b"\x80", b"garbage", b".", b"\x80\x04]", b"\x80\x04(.", b"\x80\x04h\x05.", b"a."]
)
def test_what_is_no_pickle_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        load_plain_values(data)


@given(st.binary(max_size=200))
def test_garbage_is_refused_or_a_value(data: bytes) -> None:
    with suppress(ValueError):
        load_plain_values(data)


def test_a_few_bytes_that_stand_for_a_world_are_refused() -> None:
    itself: list[Any] = []
    itself.append(itself)
    laughs: list[Any] = ["ha"]
    for _ in range(40):
        laughs = [laughs, laughs]
    for value in (itself, laughs):
        with pytest.raises(ValueError, match="too"):
            load_plain_values(pickletools.optimize(pickle.dumps(value)))


def test_a_long_string_that_is_held_often_is_refused() -> None:
    long = "nccl:" + "x" * (1 << 20)
    with pytest.raises(ValueError, match="too"):
        load_plain_values(pickle.dumps([{"profiling_name": long} for _ in range(4000)], 2))


ODD: list[Any] = [
    {"collective_seq_id": float("inf")},
    {"collective_seq_id": float("nan")},
    {"record_id": 1 << 200_000},
    {"collective_seq_id": 1, "profiling_name": "nccl:all_reduce", "input_sizes": [[1 << 200_000] * 40]},
    {"collective_seq_id": 1, "profiling_name": "nccl:all_reduce", "input_sizes": [[1 << 62] * 4000]},
    {"collective_seq_id": 1, "profiling_name": ["nccl"] * 4000, "input_dtypes": 5},
    {"is_p2p": True, "profiling_name": "nccl:send " + "9" * 5000 + "->1"},
]


@pytest.mark.parametrize("odd", ODD, ids=map(str, range(len(ODD))))
def test_an_odd_record_is_its_ranks_alone(tmp_path: Path, odd: dict[str, Any]) -> None:
    attempt = _attempt(tmp_path)
    name = str(attempt.watchdog_flight(3))
    good = {"entries": history("0", 4, inside=True)}
    Path(f"{name}1").write_bytes(pickle.dumps({"entries": [{"process_group": ("0", ""), **odd}]}, 2))
    Path(f"{name}2").write_bytes(pickle.dumps(good, 2))
    found = {one.rank: one for one in records_of_dead_ranks(attempt, 3)}
    assert found[2].groups["0"].entered == 4
    assert all(len(one.to_json()) <= WIRE for one in found.values())
    assert all(abs(entry.elements) < 2**63 for one in found.values() for entry in one.entries)


@pytest.mark.parametrize(
    "text", ["[" * 200_000, '{"entries":[{"collective_seq_id":Infinity}], "groups": ' + "[" * 200_000]
)
def test_a_record_that_cannot_be_read_is_told_and_ends_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    attempt = _attempt(tmp_path)
    whole = json.dumps({"rank": 1, "entries": history("0", 4, inside=True)})
    attempt.last_flights("n0", 3).write_text(f"{text}\n{whole}\n")
    with attempt.last_flights("n1", 3).open("w") as file:
        file.write(f'{text}\n{json.dumps({"rank": 5, "entries": history("0", 4, inside=True)})}\n{{"rank": 6, ')
    assert [one.rank for one in records_of_dead_ranks(attempt, 3)] == [1, 5]
    said = capsys.readouterr().err
    assert "cannot read a flight record in flights-n0.g003.jsonl: RecursionError" in said
    assert "cannot read a flight record in flights-n1.g003.jsonl: RecursionError" in said
    assert "cannot read a flight record in flights-n1.g003.jsonl: JSONDecodeError" in said


def test_equal_words_of_a_record_are_kept_once_and_cut() -> None:
    named = {"profiling_name": "nccl:" + "x" * 5000, "input_dtypes": ["y" * 5000]}
    flight = parse(0, {"entries": [{**call("0", number), **named, "process_group": ["g" * 5000]} for number in (1, 2)]})
    (first, second), (group,) = flight.entries, flight.groups
    assert first.op is second.op
    assert first.dtypes is second.dtypes
    assert first.group is second.group
    assert max(map(len, (first.op, first.dtypes, group))) <= 200


def test_groups_of_a_pickle_are_those_of_other_records() -> None:
    assert [*parse(0, {"entries": [{**call("7", 1), "process_group": ("abc", "eval")}]}).groups] == ["abc"]


def _attempt(tmp_path: Path) -> AttemptDir:
    run = RunDir(tmp_path / "run")
    run.make()
    attempt = run.attempt(1)
    attempt.make()
    attempt.evidence.mkdir(exist_ok=True)
    return attempt


def test_what_the_watchdog_leaves_counts_where_the_rank_left_nothing(tmp_path: Path) -> None:
    attempt = _attempt(tmp_path)
    entries = [*history("0", 4, inside=True, op="nccl:all_reduce")]
    left = {"version": "2.10", "nccl_version": "2.27.3", "entries": entries, "pg_config": {}, "pg_status": {}}
    name = str(attempt.watchdog_flight(3))
    Path(f"{name}2").write_bytes(pickle.dumps(left, 2))
    Path(f"{name}7").write_bytes(EVIL[0])
    Path(f"{name}x").write_bytes(b"")
    found = records_of_dead_ranks(attempt, 3)
    assert [(one.rank, one.groups["0"].entered, one.groups["0"].completed) for one in found] == [(2, 4, 3)]
    assert records_of_dead_ranks(attempt, 4) == []


def test_torchs_own_pickle_is_read(programs: WarmPrograms, tmp_path: Path) -> None:
    (ended,) = programs.run("tests.trainer.agent.flight.own_records", [["pickled", tmp_path / "record"]])
    assert ended.code == 0, ended.err
    left = load_plain_values((tmp_path / "record").read_bytes())
    assert left == pickle.loads((tmp_path / "record").read_bytes())
    assert [entry["input_sizes"] for entry in left["entries"]] == [[[3]], [[4]]]
