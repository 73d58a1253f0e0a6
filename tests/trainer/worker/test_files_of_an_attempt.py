"""Number of files per attempt: ranks of a node share them, because of inode quotas."""

import json
import socket
from pathlib import Path

from checkpointing.storage.durable import dump_line
from trainer.protocol.events import EventKind, read_events
from trainer.protocol.failures.rank_end import RankEnd, all_outcomes, pack_error_file
from trainer.protocol.logs.line_file import work_lines
from trainer.protocol.messages.ranks import RankSpec
from trainer.protocol.run_dir import AttemptDir, RunDir
from trainer.worker.crash_report import report_end
from trainer.worker.reporting.metrics import Journal

NODES, PER_NODE, GENERATIONS = 8, 8, 3


def spec_of(run: RunDir, rank: int, generation: int) -> RankSpec:
    return RankSpec(
        run_dir=str(run.path), attempt=1, generation=generation, rank=rank, local_rank=rank % PER_NODE,
        world_size=NODES * PER_NODE, local_world_size=PER_NODE, node=rank // PER_NODE,
        node_name=f"gpu{rank // PER_NODE}", cell_fd=-1, control_fd=-1, host="",
    )  # fmt: skip


def train(attempt: AttemptDir, spec: RankSpec) -> None:
    journal = Journal(attempt, spec)
    journal.log_work(spec.generation)
    journal.event(EventKind.DRILL, kind="raise", rank=spec.rank, step=1)
    journal.close()
    failed = RankEnd(
        rank=spec.rank, generation=spec.generation, node=spec.node_name, step=1, exit_code=1, time=1.0
    )  # fmt: skip
    agent, rank = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with agent, rank:
        report_end(spec, rank, failed)
    error_file = attempt.error_file(spec.rank, spec.generation)
    error_file.write_text(dump_line({"message": {"message": "ValueError: bad batch", "extraInfo": {}}}))
    pack_error_file(attempt, spec.node_name, spec.rank, spec.generation)


def test_the_files_of_an_attempt_are_counted_in_nodes_not_in_ranks(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.make()
    attempt = run.attempt(1)
    attempt.make()
    for generation in range(1, GENERATIONS + 1):
        for rank in range(NODES * PER_NODE):
            train(attempt, spec_of(run, rank, generation))
    files = [path for path in attempt.path.rglob("*") if path.is_file()]
    assert len(files) <= 4 * NODES + 1, sorted(path.name for path in files)  # and the steps of rank 0
    ends = {(one.rank, one.generation) for one, _ in all_outcomes(attempt)}
    assert len(ends) == len(all_outcomes(attempt)) == NODES * PER_NODE * GENERATIONS
    assert len({(line["rank"], line["step"]) for line in work_lines(attempt)}) == len(ends)
    events = [event for path in attempt.events.iterdir() for event in read_events(path)[0]]
    assert len({(event.source, event.generation, event.seq) for event in events}) == len(events) == len(ends)
    errors = [json.loads(line) for line in attempt.rank_errors("gpu3").read_text().splitlines()]
    assert {(one["rank"], one["generation"]) for one in errors} == {
        (rank, generation) for rank in range(24, 32) for generation in range(1, GENERATIONS + 1)
    }
    assert errors[0]["error"]["message"]["message"] == "ValueError: bad batch"


def test_an_error_file_that_is_no_json_stays_where_it_is(tmp_path: Path) -> None:
    attempt = AttemptDir(tmp_path)
    attempt.make()
    attempt.error_file(0, 1).write_text("{")
    pack_error_file(attempt, "n", 0, 1)
    pack_error_file(attempt, "n", 1, 1)  # left none
    assert [path.name for path in attempt.outcomes.iterdir()] == ["error-rank-00000.g001.json"]
