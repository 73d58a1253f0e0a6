"""`orch show`: speed, MFU, where the time of a step goes, and memory, as medians of the newest steps."""

from typing import Any

import pytest

from checkpointing.storage.durable import dump_line
from orchestrator.cli.runs.training_figures import (
    describe_figures,
    figures_of_run,
    loss_trend,
    step_seconds,
    training_figures,
)
from tests.orchestrator.cli.conftest import Seeds, Type
from tests.orchestrator.cli.live_jobs.test_live_attempt import begun
from trainer.protocol.run_dir import RunDir

GIB = 1 << 30


def line(step: int, seconds: float = 1.0, **more: Any) -> dict[str, Any]:
    return {
        "attempt": 1, "generation": 1, "step": step, "loss": 3.0, "time": 1000.0 + step, "seconds": seconds,
        "tokens_per_s": 4000.0 / seconds, "tflops_per_rank": 2.0 / seconds, "mfu": 0.4 / seconds,
        "work": {"data": 0.0, "forward": 0.2 * seconds, "backward": 0.4 * seconds, "optimizer": 0.1 * seconds},
        "waiting": 0.2 * seconds, "stall": 0.1 * seconds, "memory": {"allocated": 3 * GIB, "reserved": 4 * GIB}, **more,
    }  # fmt: skip


def write(place: RunDir, lines: list[dict[str, Any]], attempt: int = 1) -> None:
    place.attempt(attempt).metrics.write_text("".join(f"{dump_line(one)}\n" for one in lines))


def test_the_median_of_the_newest_hundred_steps_counts() -> None:
    slow_first = [line(step, 9.0) for step in range(1, 60)]
    usual = [line(step) for step in range(60, 160)]
    usual[30] = line(90, 50.0)  # one step that waited for something
    figures = training_figures([*slow_first, *usual], world_size=4)
    assert figures is not None
    assert figures.steps == 100
    assert figures.tokens_per_s_per_rank == pytest.approx(1000.0)
    assert (figures.tflops_per_rank, figures.mfu) == (pytest.approx(2.0), pytest.approx(0.4))
    assert figures.shares == pytest.approx(
        {"data": 0.0, "forward": 0.2, "backward": 0.4, "optimizer": 0.1, "waiting": 0.2, "saving": 0.1}
    )
    assert figures.memory == {"allocated": 3 * GIB, "reserved": 4 * GIB}


def test_a_generation_before_it_is_no_measure() -> None:
    figures = training_figures([line(1, 9.0), line(2, 9.0), line(2, generation=2)], world_size=2)
    assert figures is not None
    assert (figures.steps, figures.tokens_per_s_per_rank) == (1, 2000.0)
    assert describe_figures(figures)["speed"].endswith("(one step)")


def test_figures_of_ranks_and_traffic() -> None:
    forward = {"least": 0.1, "median": 0.2, "most": 0.5, "rank": 3}
    idle = {"least": 0.0, "median": 0.0, "most": 0.0, "rank": 0}
    older = line(50, ranks={"forward": {**forward, "rank": 1}}, bytes={"tp": 1})
    newer = line(100, ranks={"forward": forward, "data": idle, "waiting": forward}, bytes={"tp": 1 << 20, "world": 72})
    figures = training_figures([older, newer, line(101)], world_size=4)
    assert figures is not None
    words = describe_figures(figures)
    assert words["ranks"] == "slowest, relative to the median: forward rank 3 (2.50 x)"
    assert words["traffic"] == "tp 1.0 MiB, world 72 B in each step on rank 0"


def test_waiting_by_kind_of_communication() -> None:
    lines = [line(step, 2.0, exposed={"receives": 0.2, "sends": 0.02, "reductions": 0.1}) for step in range(1, 5)]
    lines[1]["exposed"] = {"receives": 1.9, "sends": 0.0, "reductions": 0.0}  # one step that waited for something
    figures = training_figures(lines, world_size=4)
    assert figures is not None
    assert figures.exposed == pytest.approx({"receives": 0.1, "sends": 0.01, "reductions": 0.05})
    told = "waiting 20 % (for other stages 10 %, until they take what is sent 1 %, in reductions 5 %), saving 10 %"
    assert told in describe_figures(figures)["time"]
    plain = training_figures([line(1), line(2, exposed={"reductions": 0.05})], world_size=4)
    assert "waiting 20 % (in reductions 5 %), saving" in describe_figures(plain)["time"]


def test_how_even_experts_are() -> None:
    loads = {"least": 0.5, "median": 1.0, "most": 2.25, "layer": 1, "expert": 6}
    figures = training_figures([line(50, experts=loads), line(51)], world_size=4)
    words = describe_figures(figures)["experts"]
    assert words == "0.50 to 2.25 x the mean tokens of their layer, most expert 6 of layer 1"


def test_what_nobody_knows_is_left_out() -> None:
    bare = {"attempt": 1, "generation": 1, "step": 3, "loss": 1.0, "time": 1.0, "seconds": 1.0}
    figures = training_figures([bare], world_size=1)
    assert figures is not None
    assert not any(describe_figures(figures).values())
    assert training_figures([], world_size=1) is None


def test_show_prints_them_and_programs_get_them(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    assert orch("show", run, "--json").data["figures"] is None
    assert "tokens/s" not in orch("show", run).out
    write(begun(seeds, run), [line(step) for step in range(1, 121)])  # on two nodes with two ranks each
    shown = {words[:9].strip(): words[9:] for words in orch("show", run).out.splitlines()[:8]}
    assert shown["speed"] == "1000 tokens/s per rank   2 TFLOP/s per rank   MFU 40.0 %   (median of 100 steps)"
    assert shown["time"] == "forward 20 %, backward 40 %, optimizer 10 %, waiting 20 %, saving 10 % of a step on rank 0"
    assert shown["memory"] == "allocated 3.0 GiB, reserved 4.0 GiB at most on rank 0"
    data = orch("show", run, "--json").data["figures"]
    assert (data["steps"], data["tokens_per_s_per_rank"], data["mfu"]) == (100, 1000.0, 0.4)
    assert data["shares"]["backward"] == pytest.approx(0.4)
    assert data["memory"] == {"allocated": 3 * GIB, "reserved": 4 * GIB}


def test_figures_of_newest_trained_attempt(seeds: Seeds) -> None:
    place = begun(seeds, seeds.run())
    write(place, [line(1), line(2)])
    place.attempt(2).make()
    figures = figures_of_run(place)
    assert figures is not None
    assert figures.steps == 2


def test_files_that_cannot_be_read_are_no_figures(seeds: Seeds) -> None:
    place = begun(seeds, seeds.run())
    write(place, [line(1)])
    with place.attempt(1).metrics.open("a") as stream:
        stream.write('[1]\n{"step": 2, "secon\n')
    figures = figures_of_run(place)
    assert figures is not None
    assert figures.steps == 1
    place.config.write_text("{")
    assert figures_of_run(place) is None


def test_the_time_and_the_trend_are_those_of_the_newest_generation() -> None:
    first = [line(step, 0.1, loss=4.0 - step / 100) for step in range(1, 102)]
    assert step_seconds(first) == pytest.approx(0.1)
    assert loss_trend(first) == (pytest.approx(-1.0), 100)
    again = [line(step, generation=2) for step in range(60, 71)]
    assert (step_seconds([*first, *again]), loss_trend([*first, *again])) == (1.0, (0.0, 10))


def test_a_noisy_step_is_no_trend() -> None:
    steps = [*(line(step) for step in range(1, 101)), line(101, loss=40.0), line(102, loss="nan")]
    change, count = loss_trend(steps)
    assert change is not None
    assert change < 3.0
    assert count == 101


@pytest.mark.parametrize("count", [0, 1])
def test_few_steps_have_no_trend(count: int) -> None:
    steps = [line(step, 0.1) for step in range(count)]
    assert (step_seconds(steps), loss_trend(steps)) == (0.1 if count else None, (None, 0))
