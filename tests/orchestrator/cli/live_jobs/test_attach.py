"""`orch attach --stack`: what faulthandler and py-spy wrote is read back, and whom it asks."""

import pytest

from checkpointing.storage.durable import dump_line
from orchestrator.cli.live_jobs.attach import Frame, parse, read_stacks
from tests.orchestrator.cli.conftest import Seeds, Type
from tests.orchestrator.cli.live_jobs.test_live_attempt import Agent, begun
from trainer.protocol.rank_readings import RankReading, RankReadings
from trainer.protocol.run_dir import RunDir

FAULTHANDLER = """Thread 0x00007f0a00000001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/usr/lib/python3.11/threading.py", line 1000 in run

Current thread 0x00007f0a00000000 (most recent call first):
  File "/r/loop.py", line 118 in _accumulate
  File "/r/loop.py", line 80 in <lambda>
  File "<string>", line 1 in <module>
"""
PY_SPY = """Process 41: orch-rank-1
Python v3.11.7 (/usr/bin/python3.11)

Thread 41 (idle): "MainThread"
    forward (torch/nn/linear.py:134)
    _accumulate (loop.py:118)
"""


def test_parse_faulthandler() -> None:
    waiting, current = parse(3, FAULTHANDLER)
    assert (waiting.rank, waiting.name) == (3, "0x00007f0a00000001")
    assert current.name == "0x00007f0a00000000 (current)"
    assert [frame.function for frame in current.frames] == ["<module>", "<lambda>", "_accumulate"]
    assert current.frames[-1] == Frame("/r/loop.py", 118, "_accumulate")


def test_parse_py_spy() -> None:
    (thread,) = parse(1, PY_SPY)
    assert thread.name == '41 (idle) "MainThread"'
    assert thread.frames == [Frame("loop.py", 118, "_accumulate"), Frame("torch/nn/linear.py", 134, "forward")]


@pytest.mark.parametrize("text", ["", "no thread at all\n  File x", '  File "a", line 1 in f\n'])
def test_parse_other_text(text: str) -> None:
    assert list(parse(0, text)) == []


def filled(folder: RunDir) -> str:
    name = "attempts/001/evidence/attach-1"
    stacks = folder.path / name / "stacks"
    stacks.mkdir(parents=True)
    (stacks / "rank-00000.txt").write_text(FAULTHANDLER)
    (stacks / "rank-00000.py-spy.txt").write_text(PY_SPY)
    (stacks / "rank-00001.py-spy.txt").write_text(PY_SPY)
    ranks = tuple(RankReading(rank=rank, node=f"n{rank // 2 + 1}", state="T", ended=rank == 2) for rank in (0, 1, 2))
    RankReadings(generation=1, world=4, ranks=ranks).write(folder.attempt(1).ranks)
    cells = folder.path / name / "node-0001" / "cells.json"
    cells.parent.mkdir()
    cells.write_text(dump_line({"3": {"pid": 44, "seen": {"rank": 3, "node": "n2", "state": "T", "ended": False}}}))
    return name


def test_attach_prints_every_rank_s_threads(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    folder = begun(seeds, run)
    with Agent(folder, filled(folder)) as agent:
        said = orch("attach", run, "--stack")
        data = orch("attach", run, "--stack", "--rank", 1, "--json").data
        orch("attach", run, "--stack", "--node", 1)
    assert said.code == 0
    assert "rank 0 on n1, thread 0x00007f0a00000000 (current) (newest call last)\n" in said.out
    assert said.out.index("<module>") < said.out.index("_accumulate")
    assert data["missing"] == [], "only rank 1 was asked for"
    assert [(one["rank"], one["node"]) for one in data["threads"]] == [(0, "n1"), (0, "n1"), (1, "n1")]
    assert [(request.value, request.detail) for request in agent.asked] == [(None, ""), (1, ""), (None, "1")]
    assert len(read_stacks(folder.path / "attempts/001/evidence/attach-1/stacks")) == 3


def test_ranks_that_were_asked_and_are_missing_are_named(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    folder = begun(seeds, run)
    with Agent(folder, filled(folder)):
        said = orch("attach", run, "--stack")
        as_json = orch("attach", run, "--stack", "--json")
        of_node = orch("attach", run, "--stack", "--node", 1, "--json").data
    assert (said.code, as_json.code) == (0, 0)
    assert "rank 2 on n2 did not answer: it has ended\n" in said.out
    assert "rank 3 on n2 did not answer: its process is stopped\n" in said.out
    assert "rank 1 on n1 did not" not in said.out
    expected = [(2, "n2", "it has ended"), (3, "n2", "its process is stopped")]
    assert [(one["rank"], one["node"], one["why"]) for one in as_json.data["missing"]] == expected
    assert of_node["missing"] == as_json.data["missing"]


def test_ranks_that_cannot_tell_are_said_to_be_so(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    with Agent(begun(seeds, run), "attempts/001/evidence/attach-1"):
        said = orch("attach", run, "--stack")
    assert said.code == 4
    assert "no rank reported its stack: rank 0 did not answer; rank 1 did not answer" in said.err


def test_attach_says_what_to_ask_for(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    assert orch("attach", run).code == 4  # what would have to be typed instead is not possible yet
    begun(seeds, run)
    assert orch("attach", run).code == 2
    assert "orch attach tiny-1 --stack" in orch("attach", run).err
    assert orch("attach", run, "--stack", "--rank", 1, "--node", 0).code == 2


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (("attach", "--stack", "--rank", 4), "there is no rank 4, only 0 to 3"),
        (("attach", "--stack", "--node", 3), "there is no node 3, only 0 to 2"),
        (("logs", "--rank", 77), "there is no rank 77, only 0 to 3"),
        (("logs", "--rank", 77, "-f"), "there is no rank 77, only 0 to 3"),
        (("logs", "--node", 12), "there is no node 12, only 0 to 2"),
        (("logs", "--node", 2), "there is no such log (yet)"),
    ],
)
def test_unknown_rank_or_node(
    orch: Type, seeds: Seeds, asked: tuple[str, ...], told: str
) -> None:  # fmt: skip
    run = seeds.run()
    folder = begun(seeds, run, nodes=("n1", "n2", "n3"))
    said = orch(asked[0], run, *asked[1:])
    assert f"error: {told}\n" in said.err
    assert said.code == (3 if "(yet)" in told else 2)
    assert not list(folder.requests.iterdir())
