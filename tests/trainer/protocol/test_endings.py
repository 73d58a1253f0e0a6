"""Outcomes, launch tokens, requests and rank messages: what is written reads back, and damage is noticed."""

import json
import os
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from tests.checkpointing.proofs.mounts import small_tmpfs
from trainer.protocol.events import read_events
from trainer.protocol.failures.outcome import AttemptOutcome, AttemptResult, ExitCode, Failure, FailureKind
from trainer.protocol.failures.rank_end import RankEnd, all_outcomes, append_outcome, find_outcome
from trainer.protocol.heartbeat import Heartbeat
from trainer.protocol.launch_token import LaunchToken, holds, is_revoked, revoke
from trainer.protocol.messages.ranks import FROM_RANK, TO_RANK, RankSpec, RendezvousStore, receive_message, send_message
from trainer.protocol.requests import Request, RequestKind, pending
from trainer.protocol.run_dir import AttemptDir, RunDir

TOKEN = LaunchToken(
    attempt=2, epoch=5, job_id="77", nonce="0123abcd", checkpoints=("step-00000003.001-aa",),
    perhaps=("step-00000004.001-aa",), over=("001-aa",),
)  # fmt: skip


def test_a_ranks_outcome(tmp_path):
    outcome = RankEnd(
        rank=3, generation=2, node="n1", step=7, exit_code=ExitCode.ERROR, time=1.5,
        exception="ValueError", message="wrong", traceback="Traceback ...", secondary=True,
    )  # fmt: skip
    attempt = AttemptDir(tmp_path)
    append_outcome(attempt, outcome)
    assert find_outcome(attempt, "n1", 3, 2) == outcome
    assert all_outcomes(attempt) == [(outcome, attempt.rank_outcomes("n1"))]
    assert find_outcome(attempt, "n1", 3, 1) is None
    assert find_outcome(attempt, "n2", 3, 2) is None


def test_an_outcome_with_words_that_are_no_unicode(tmp_path):
    outcome = RankEnd(rank=0, generation=1, node="n", step=1, exit_code=1, time=1.0, message="caf\udce9")
    append_outcome(AttemptDir(tmp_path), outcome)
    ((found, _),) = all_outcomes(AttemptDir(tmp_path))
    assert found.message == "caf\\udce9"


def test_a_ranks_outcome_and_the_name_of_its_file_are_durable(tmp_path, monkeypatch):
    attempt, synced = AttemptDir(tmp_path), []
    attempt.outcomes.mkdir()
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(Path(f"/proc/self/fd/{descriptor}").readlink()))
    append_outcome(attempt, RankEnd(rank=0, generation=1, node="n", step=1, exit_code=1, time=1.0))
    assert synced == [attempt.rank_outcomes("n"), attempt.outcomes]


def test_torn_outcomes_are_skipped(tmp_path):
    attempt = AttemptDir(tmp_path)
    outcome = RankEnd(rank=0, generation=1, node="n", step=1, exit_code=1, time=1.0)
    attempt.outcomes.mkdir()
    torn = ('{"rank":1,"generation":1,"no', "[1, 2]", RANK_OUTCOME.replace('"rank":2', '"rank":null'))
    attempt.rank_outcomes("n").write_text("\n".join(torn))
    append_outcome(attempt, outcome)
    assert [found.rank for found, _ in all_outcomes(attempt)] == [0]
    assert find_outcome(attempt, "n", 0, 1) == outcome


def test_an_attempts_outcome_names_files_that_are_no_unicode(tmp_path):
    failure = Failure(kind=FailureKind.STORAGE, reason="lacks caf\udce9", lines=("caf\udce9",))
    outcome = AttemptOutcome(
        attempt=1, job_id="77", result=AttemptResult.FAILED, reason="lacks caf\udce9", exit_code=75, step=9,
        generations=2, started_at=1.0, ended_at=2.0, failure=failure,
    )  # fmt: skip
    outcome.write(tmp_path / "outcome.json")
    read = AttemptOutcome.read(tmp_path / "outcome.json")
    assert (read.reason, read.failure.lines) == ("lacks caf\\udce9", ("caf\\udce9",))


def test_a_word_that_is_no_unicode_over_the_control_socket():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        end = RankEnd(rank=0, exit_code=1, step=3, message="caf\udce9")
        send_message(ours, end)
        assert receive_message(theirs, FROM_RANK) == end


@pytest.mark.parametrize("failure", [None, Failure(kind=FailureKind.RANK_KILLED, reason="rank 1: SIGKILL", signal=9)])
def test_an_attempts_outcome(tmp_path, failure):
    outcome = AttemptOutcome(
        attempt=1, job_id="77", result=AttemptResult.FAILED, reason="r", exit_code=75, step=9, generations=2,
        started_at=1.0, ended_at=2.0, failure=failure,
    )  # fmt: skip
    outcome.write(tmp_path / "outcome.json")
    assert AttemptOutcome.read(tmp_path / "outcome.json") == outcome


def test_a_failure_from_a_newer_version_loses_only_what_is_unknown():
    fields = {**Failure(kind=FailureKind.STORAGE, reason="full").to_json(), "added_later": 1}
    assert Failure.from_json(fields) == Failure(kind=FailureKind.STORAGE, reason="full")


def test_exit_codes_that_scripts_depend_on():
    assert {code.name: int(code) for code in ExitCode} == {
        "FINISHED": 0, "ERROR": 1, "STORAGE": 74, "RETRY": 75, "STOPPED_AFTER_SAVE": 76, "NODE_SUSPECT": 77,
        "NEVER_RETRY": 78,
    }  # fmt: skip


def test_a_token_holds_until_it_is_revoked_or_replaced(tmp_path):
    path = tmp_path / "GO"
    assert not holds(path, TOKEN)
    TOKEN.write(path)
    assert LaunchToken.read(path) == TOKEN
    assert holds(path, TOKEN)
    LaunchToken(attempt=2, epoch=6, job_id="78", nonce="0123abcd").write(path)
    assert not holds(path, TOKEN)
    revoke(path)
    revoke(path)
    assert not path.exists()


@pytest.mark.parametrize("text", ["", "[]", '{"schema":"orch.go/2"}', '{"schema":"orch.go/1","surprise":1}'])
def test_a_damaged_token_counts_as_revoked(tmp_path, text):
    (tmp_path / "GO").write_text(text)
    assert not holds(tmp_path / "GO", TOKEN)


def test_requests_are_pending_until_answered(tmp_path):
    stop = Request(kind=RequestKind.STOP, attempt=1, reason="by hand")
    name = stop.write(tmp_path)
    Request(kind=RequestKind.DEADLINE, attempt=2, reason="Slurm says", value=12.5).write(tmp_path)
    (tmp_path / "note.txt").write_text("no request")
    (tmp_path / "broken.json").write_text("{")
    (found,) = pending(tmp_path, 1, set())
    assert (found.kind, found.reason, found.name) == (RequestKind.STOP, "by hand", name)
    assert pending(tmp_path, 1, {name}) == []
    assert [request.value for request in pending(tmp_path, 2, set())] == [12.5]
    assert pending(tmp_path / "none", 1, set()) == []


def test_a_rank_spec_travels_as_text():
    spec = RankSpec(
        run_dir="/r", attempt=1, generation=2, rank=3, local_rank=1, world_size=4, local_world_size=2, node=1,
        node_name="n1", cell_fd=5, control_fd=6, host="10.0.0.2", env={"A": "b"},
    )  # fmt: skip
    assert RankSpec.from_json(spec.to_json()) == spec


def test_words_over_the_control_socket():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    store = RendezvousStore(host="n0", port=29500, key="00")
    send_message(ours, store)
    assert receive_message(theirs, TO_RANK) == store
    ours.close()
    assert receive_message(theirs, TO_RANK) is None
    theirs.close()


def test_a_run_folder_is_private_and_never_taken_over(tmp_path):
    run = RunDir(tmp_path / "demo-1")
    run.make()
    assert run.path.stat().st_mode & 0o777 == 0o700
    with pytest.raises(FileExistsError):
        run.make()
    for number in (10, 9):
        run.attempt(number).make()
    assert [attempt.number for attempt in run.all_attempts()] == [9, 10]


def test_a_request_s_details_read_back_and_older_files_have_none(tmp_path):
    Request(kind=RequestKind.DRILL, attempt=1, reason="?", value=3, detail="stop-rank").write(tmp_path)
    (tmp_path / "stacks.001.0.json").write_text('{"kind":"stacks","attempt":1,"reason":"","value":null}')
    drill, stacks = pending(tmp_path, 1, set())
    assert (drill.kind, drill.value, drill.detail) == (RequestKind.DRILL, 3, "stop-rank")
    assert (stacks.kind, stacks.value, stacks.detail) == (RequestKind.STACKS, None, "")


def read(folder: Path, **fields: object) -> Heartbeat:
    (folder / "heartbeat.json").write_text(json.dumps({"schema": "orch.heartbeat/1", "seq": 4, **fields}))
    return Heartbeat.read(folder / "heartbeat.json")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    beat = Heartbeat(seq=3, time=5.5, attempt=1, job_id="7", step=9, loss=float("nan"), nodes=["n1"], phase="data")
    beat.write(tmp_path / "heartbeat.json")
    found = Heartbeat.read(tmp_path / "heartbeat.json")
    assert str(found.loss) == "nan"
    assert {**vars(found), "loss": 0.0} == {**vars(beat), "loss": 0.0}


@pytest.mark.parametrize("odd", [10**400, float("inf"), "soon", None, [], True])
def test_numbers_that_nothing_can_hold_count_as_left_out(tmp_path: Path, odd: object) -> None:
    found = read(tmp_path, time=odd, step=odd, total_steps=odd, loss=None if odd == "soon" else odd)
    assert found == Heartbeat(seq=4)


@pytest.mark.parametrize("odd", [10**400, float("inf"), "4", None])
def test_one_that_does_not_count_is_refused(tmp_path: Path, odd: object) -> None:
    with pytest.raises(ValueError, match="heartbeat.json: seq="):
        read(tmp_path, seq=odd)


def test_an_attempt_is_fenced_off_without_a_free_inode(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "disk", "1m,nr_inodes=6") as disk:
        go, token = disk / "GO", LaunchToken(attempt=1, epoch=1, job_id="7", nonce="0badcafe")
        token.write(go)
        with suppress(OSError):
            for number in range(100):
                (disk / f"file-{number}").touch()
        with pytest.raises(OSError, match="No space left"):
            (disk / "another").touch()
        assert holds(go, token)
        revoke(go)
        assert is_revoked(go)
        assert not holds(go, token)
        revoke(go)
        assert is_revoked(go)


OUTCOME = (
    '{"schema":"orch.outcome/1","attempt":2,"job_id":"77","result":"failed","reason":"rank 1 was killed by SIGKILL",'
    '"exit_code":75,"step":9,"generations":3,"started_at":1.0,"ended_at":2.0,"failure":{"kind":"rank_killed",'
    '"reason":"rank 1 was killed by SIGKILL","rank":1,"node":"n0","step":9,"exit_code":null,"signal":9,'
    '"exception":null,"message":null,"evidence":null,"lines":[],"culprits":[{"rank":1,"node":"n0","kind":"dead",'
    '"reason":"gone"}],"room":0,"script":false,"drill":""}}'
)
RANK_OUTCOME = (
    '{"rank":2,"generation":1,"node":"n","step":7,"exit_code":1,"time":1.5,"exception":"ValueError","message":"bad",'
    '"traceback":"Traceback ...","secondary":false,"position":56}\n'
)
HEARTBEAT = (
    '{"schema":"orch.heartbeat/1","seq":4,"time":5.0,"attempt":2,"job_id":"77","generation":3,"step":9,"total_steps":20,'
    '"loss":1.5,"phase":"forward","saved_step":8,"nodes":["n0"],"state":"running","saves_failing":""}\n'
)
EVENT = (
    '{"time":1.5,"source":"coordinator","seq":1,"kind":"rank.exited","attempt":2,"generation":3,'
    '"data":{"rank":1,"node":"n0","exit_code":null,"signal":9,"reason":"killed by SIGKILL"}}\n'
)


def test_files_written_before_a_rank_had_one_end_are_read(tmp_path):
    attempt = AttemptDir(tmp_path / "002")
    attempt.make()
    attempt.outcome.write_text(OUTCOME)
    attempt.rank_outcomes("n").write_text(RANK_OUTCOME)
    attempt.heartbeat.write_text(HEARTBEAT)
    attempt.event_file("coordinator").write_text(EVENT)
    failure = AttemptOutcome.read(attempt.outcome).failure
    assert (failure.kind, failure.signal, failure.nodes) == (FailureKind.RANK_KILLED, 9, ("n0",))
    end = find_outcome(attempt, "n", 2, 1)
    assert (end.exit_code, end.exception, end.step, end.position, end.good) == (1, "ValueError", 7, 56, False)
    append_outcome(attempt, end)
    assert attempt.rank_outcomes("n").read_text() == RANK_OUTCOME * 2, "later versions write the same keys"
    assert (Heartbeat.read(attempt.heartbeat).step, Heartbeat.read(attempt.heartbeat).nodes) == (9, ["n0"])
    ((event,), _) = read_events(attempt.event_file("coordinator"))
    assert (event.kind, event.generation, event.data["signal"]) == ("rank.exited", 3, 9)
