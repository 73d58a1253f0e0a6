"""`orch top`: what files tell of a live run, the ranks to look at, one picture without a terminal."""

import io
import re
import time
from functools import partial
from typing import Any

import pytest
from rich.console import Console

from checkpointing.storage.durable import dump_line
from orchestrator.cli.live_jobs.top import LiveRunReader, print_reading, select_ranks, worst_ranks
from orchestrator.cli.terminal.render import Screen, plain
from orchestrator.registry.records import Generation
from orchestrator.states import RunState, Trust
from tests.orchestrator.cli.conftest import Patch, Seeds, Type
from tests.orchestrator.cli.forked_orch import on_a_terminal
from tests.orchestrator.cli.live_jobs.test_live_attempt import begun
from trainer.protocol.events import EventKind, EventLog
from trainer.protocol.rank_readings import RankReading, RankReadings
from trainer.protocol.run_dir import AttemptDir


def rank(number: int, **more: Any) -> RankReading:
    fields: dict[str, Any] = {"step": 121, "phase": "forward", "age": 0.1, "state": "R", **more}
    return RankReading(rank=number, node=f"n{number // 2 + 1}", **fields)


def training(seeds: Seeds, ranks: list[RankReading], *, generation: int = 2, world: int | None = None) -> str:
    run = seeds.run()
    seeds.checkpoint(run, 100)
    place: AttemptDir = begun(seeds, run).attempt(1)
    beat = {
        "seq": 9, "time": time.time() - 3, "attempt": 1, "generation": 2, "step": 120, "phase": "forward",
        "saved_step": 110, "state": "running",
    }  # fmt: skip
    place.heartbeat.write_text(dump_line(beat))
    RankReadings(generation=generation, world=world or len(ranks), ranks=tuple(ranks)).write(place.ranks)
    line = {"attempt": 1, "generation": 2, "step": 121, "loss": 2.25, "tokens_per_s": 81000.4, "time": time.time()}
    place.metrics.write_text(dump_line(line) + "\n")
    log = EventLog(place.event_file("coordinator"), "coordinator", 1)
    log.write(EventKind.STRAGGLER, rank=1, node="n1", section="forward", ratio=1.3, over=False)
    log.close()
    return run


def test_one_picture_of_a_live_run(orch: Type, seeds: Seeds) -> None:
    run = training(seeds, [rank(0), rank(1, ratio=1.31), rank(2, age=7.26, state="T")])
    said = orch("top", run)
    assert said.code == 0
    first, second, third, fourth, _, event, _, head, *rows = said.out.splitlines()
    assert first == "tiny-1  RUNNING"
    assert second == "step 121 of 200 (60 %)   loss 2.2500   81000 tokens/s"
    assert third.startswith("attempt 1 generation 2   running: forward   heartbeat ")
    assert fourth == "last checkpoint step 110 COMMITTED"  # the registry has read of step 100 so far
    assert head.split() == ["RANK", "NODE", "STEP", "PHASE", "STILL", "FOR", "OWN", "WORK", "STATE"]
    assert [row.split() for row in rows] == [
        ["0", "n1", "121", "forward"],
        ["1", "n1", "121", "forward", "1.31", "x"],
        ["2", "n2", "121", "forward", "7.3", "s", "stopped"],
    ]
    assert "rank 1 on n1 is slow: forward takes 1.30 x its peers' time" in event
    assert orch("top", run, "--once").out.splitlines()[1] == second


@pytest.mark.parametrize(
    ("state", "phase", "said"),
    [
        ("joining", "init", "generation 0   checking nodes   heartbeat"),
        ("warming", "init", "generation 0   importing torch and your code   heartbeat"),
        ("running", "init", "generation 0   running: init   heartbeat"),
        ("clearing", "forward", "generation 0   ending the remaining ranks   heartbeat"),
        ("ended", "done", "generation 0   ended: done   heartbeat"),
    ],
)
def test_stage_without_ranks(orch: Type, seeds: Seeds, state: str, phase: str, said: str) -> None:
    run = seeds.run()
    beat = {"seq": 1, "time": time.time(), "attempt": 1, "generation": 0, "step": 0, "phase": phase, "state": state}
    begun(seeds, run).attempt(1).heartbeat.write_text(dump_line(beat))
    assert said in orch("top", run).out


def test_last_checkpoint_from_files(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    place = begun(seeds, run).attempt(1)
    assert "last checkpoint none" in orch("top", run).out
    log = EventLog(place.event_file("rank-00000"), "rank-00000", 1)
    log.write(EventKind.CHECKPOINT_COMMITTED, step=140, name="x", bytes=7, seconds=0.1)
    log.close()
    assert re.search(r"last checkpoint step 140 COMMITTED, \d+s ago", orch("top", run).out)
    last = orch("top", run, "--json").data["last_checkpoint"]
    assert (last["step"], last["trust"]) == (140, "COMMITTED")
    seeds.checkpoint(run, 160)
    assert "last checkpoint step 160 VERIFIED" in orch("top", run).out


def test_last_checkpoint_skips_bad_and_set_aside_ones(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    log = EventLog(begun(seeds, run).attempt(1).event_file("coordinator"), "coordinator", 1)
    for step in (5, 6):
        log.write(EventKind.CHECKPOINT_SEEN, step=step, name=f"c-{step}.1f", path=f"/out/c-{step}", bytes=7, new=True)
    log.write(EventKind.CHECKPOINT_SET_ASIDE, step=6, name="c-6.1f", path="/a/6", reason="torn", damaged=True)
    log.close()
    assert "last checkpoint step 5 COMMITTED" in orch("top", run).out
    seeds.checkpoint(run, 4)
    seeds.checkpoint(run, 5, Trust.CORRUPT)
    assert "last checkpoint step 4 VERIFIED" in orch("top", run).out


def test_a_reading_for_programs(orch: Type, seeds: Seeds) -> None:
    run = training(seeds, [rank(0), rank(1)])
    data = orch("top", run, "--json").data
    assert (data["step"], data["total_steps"], data["loss"], data["tokens_per_s"]) == (121, 200, 2.25, 81000.4)
    assert (data["generation"], data["phase"], data["saved_step"], data["world"]) == (2, "forward", 110, 2)
    assert [row["rank"] for row in data["ranks"]] == [0, 1]
    assert 2.9 < data["silent_s"] < 60
    (event,) = data["events"]
    assert event["text"].startswith("attempt 1: rank 1 on n1 is slow")


def test_speed_and_trend_have_a_line(orch: Type, seeds: Seeds) -> None:
    run = training(seeds, [rank(0)])
    place = seeds.root / run / "attempts/001/metrics/steps.jsonl"
    now = time.time()
    own = {"attempt": 1, "generation": 2, "seconds": 0.5}
    lines = [{**own, "step": step, "loss": 4.0 - step / 100, "time": now - 121 + step} for step in range(100, 122)]
    place.write_text("".join(dump_line(line) + "\n" for line in lines))
    data = orch("top", run, "--json").data
    assert list(data)[-5:] == ["step_seconds", "eta_s", "expected_start", "loss_change", "loss_steps"]
    assert (data["step_seconds"], data["loss_steps"]) == (0.5, 21)
    assert data["loss_change"] == pytest.approx(-0.21)
    assert data["eta_s"] is None, "the registry knows no speed yet"
    generation = Generation(run=run, attempt=1, number=2, started_at=now - 2100, resumed_from=100)
    seeds.store.put_generation(generation, epoch=seeds.epoch)
    seeds.store.note_run(run, epoch=seeds.epoch, now=now + 210, step=121)  # 21 steps after the checkpoint
    left = orch("status", run, "--json").data[0]["eta_s"]
    assert left is not None
    assert orch("top", run, "--json").data["eta_s"] == pytest.approx(left, abs=20.0)
    third = orch("top", run).out.splitlines()[2]
    assert third.startswith("ETA ")
    assert third.endswith("0.5 s/step   loss changed by -0.2100 in 21 steps")


def test_mfu_and_time_shares(orch: Type, seeds: Seeds) -> None:
    run = training(seeds, [rank(0)])
    place = seeds.root / run / "attempts/001/metrics/steps.jsonl"
    line = {
        "attempt": 1, "generation": 2, "step": 121, "loss": 2.25, "tokens_per_s": 81000.4, "time": time.time(),
        "seconds": 0.5, "stall": 0.05, "mfu": 0.4125, "waiting": 0.1,
        "work": {"data": 0.001, "forward": 0.1, "backward": 0.2, "optimizer": 0.049},
    }  # fmt: skip
    place.write_text(dump_line(line) + "\n")
    lines = orch("top", run).out.splitlines()
    assert lines[1] == "step 121 of 200 (60 %)   loss 2.2500   81000 tokens/s   MFU 41.2 %"
    assert "rank 0: forward 20 %, backward 40 %, optimizer 10 %, waiting 20 %, saving 10 %" in lines


def test_ranks_of_a_generation_that_is_over_are_not_shown(orch: Type, seeds: Seeds) -> None:
    run = training(seeds, [rank(0)], generation=1)
    assert orch("top", run, "--json").data["ranks"] == []


def test_a_large_job_shows_the_ranks_to_look_at(orch: Type, seeds: Seeds) -> None:
    ranks = [rank(number) for number in range(64)]
    ranks[40] = rank(40, state="T", age=9.0)
    ranks[7] = rank(7, ratio=1.2)
    shown = orch("top", training(seeds, ranks, world=512)).out
    assert "10 of 512 ranks that need attention" in shown
    assert len([line for line in shown.splitlines() if " forward" in line and "n" in line.split()[1]]) == 10
    assert "stopped" in shown
    assert "1.20 x" in shown


@pytest.mark.parametrize(
    ("odd", "why"),
    [({"state": "T"}, "stopped"), ({"ratio": 1.1}, "slow"), ({"step": 120}, "behind"), ({"age": 5.0}, "still")],
)
def test_the_worst_ranks(odd: dict[str, Any], why: str) -> None:
    ranks = [rank(number) for number in range(20)]
    ranks[13] = rank(13, **odd)
    assert [one.rank for one in worst_ranks(ranks, 1)] == [13], why


def test_a_rank_that_has_ended_is_no_stopped_one() -> None:
    assert worst_ranks([rank(0, state="X", ended=True), rank(1, ratio=1.1)], 1)[0].rank == 1


def test_run_without_job(orch: Type, seeds: Seeds) -> None:
    said = orch("top", seeds.run())
    assert (said.code, said.out.splitlines()[0]) == (0, "tiny-1  RUNNING")


def test_top_on_a_terminal(seeds: Seeds) -> None:
    run = training(seeds, [rank(0)])
    seeds.store.move_run(run, RunState.SUCCEEDED, "all ranks finished", epoch=seeds.epoch, now=time.time())
    assert "tiny-1  SUCCEEDED  all ranks finished" in on_a_terminal(seeds.store, "top", run)


def drawn(seeds: Seeds, run: str, monkeypatch: Patch, *, height: int, width: int = 80) -> list[str]:
    paper = io.StringIO()
    console = Console(file=paper, width=width, height=height, force_terminal=True, no_color=True, highlight=False)
    monkeypatch.setattr(Screen, "_console", lambda _self, _stream: console)
    screen, reading = Screen(), LiveRunReader(run, seeds.root / run).read()
    with screen.live_page() as draw:
        draw(partial(print_reading, screen, reading))
        text = paper.getvalue()
    return plain(text.replace("\r", "")).splitlines()


def plentiful(seeds: Seeds, ranks: int) -> str:
    rows = [rank(number) for number in range(ranks)]
    rows[-1] = rank(ranks - 1, state="T", age=9.0)
    run = training(seeds, rows)
    log = EventLog(seeds.root / run / "attempts/001/events/coordinator.jsonl", "coordinator", 1)
    for step in range(6):
        log.write(EventKind.CHECKPOINT_SKIPPED, step=step, reason=f"{'no free copy and ' * 5}that is all of {step}")
    log.close()
    return run


@pytest.mark.parametrize(("height", "width"), [(24, 80), (24, 200), (16, 80), (40, 80)])
def test_live_display_fits(seeds: Seeds, monkeypatch: Patch, height: int, width: int) -> None:
    lines = drawn(seeds, plentiful(seeds, 32), monkeypatch, height=height, width=width)
    assert len(lines) <= height
    text = " ".join(" ".join(lines).split())
    assert "that is all of 5" in text
    assert [line.split() for line in lines if "stopped" in line] == [
        ["31", "n16", "121", "forward", "9.0", "s", "stopped"]
    ]
    assert "of 32 ranks that need attention" in text
    assert len([line for line in lines if " forward" in line]) > 1


def test_where_all_ranks_fit_all_are_live(seeds: Seeds, monkeypatch: Patch) -> None:
    lines = drawn(seeds, plentiful(seeds, 32), monkeypatch, height=60)
    assert [line.split()[0] for line in lines if " forward" in line and " n" in line] == [str(n) for n in range(32)]


def test_one_rank_at_least_is_looked_at(seeds: Seeds) -> None:
    reading = LiveRunReader(plentiful(seeds, 32), seeds.root / "tiny-1").read()
    assert [one.rank for one in select_ranks(reading, 0)] == [31]
    assert len(select_ranks(reading, None)) == 32


@pytest.mark.parametrize("state", [RunState.SUCCEEDED, RunState.HELD])
def test_a_run_that_is_over_has_no_ranks(orch: Type, seeds: Seeds, state: RunState) -> None:
    run = training(seeds, [rank(0), rank(1)])
    seeds.store.move_run(run, state, "over", epoch=seeds.epoch, now=time.time())
    said = orch("top", run)
    assert "RANK" not in said.out
    assert orch("top", run, "--json").data["ranks"] == []
