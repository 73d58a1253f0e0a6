"""`orch priority` and `orch submit --priority`."""

import pytest

from orchestrator.cli.runs import cancel_resume
from orchestrator.config.compose import compose
from orchestrator.controller import service
from orchestrator.controller.own_queue import by_priority, configured_nice, order_pending, run_priority
from orchestrator.observed_since import ObservedSince
from orchestrator.scheduler.interface import JobStatus
from orchestrator.scheduler.slurm.own_order import WantedOrder
from orchestrator.states import RunState
from tests.fakes.model_clock import FakeClock
from tests.orchestrator.cli.conftest import Seeds, Type


@pytest.mark.parametrize(("word", "value"), [("high", 10), ("normal", 0), ("low", -10), ("7", 7), ("-3", -3)])
def test_a_request_is_recorded_for_the_controller(
    orch: Type, seeds: Seeds, word: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancel_resume, "ANSWER_TIMEOUT", 0.0)
    monkeypatch.setattr(service, "ensure_running", lambda path, kind: False)
    run = seeds.run()
    orch("priority", run, word)
    (request,) = seeds.store.user_requests()
    assert (request.run, request.verb, request.args) == (run, "priority", {"value": value})


@pytest.mark.parametrize("word", ["urgent", "1.5", "1001", "-1001"])
def test_wrong_priorities_are_refused(orch: Type, seeds: Seeds, word: str) -> None:
    run = seeds.run()
    for words in (("priority", run, word), ("submit", "tiny-gpt", "--priority", word)):
        refused = orch(*words)
        assert refused.code == 2, refused.err
        assert word in refused.err
    assert seeds.store.user_requests() == []


def test_a_run_that_is_over_has_no_priority(orch: Type, seeds: Seeds) -> None:
    run = seeds.run(state=RunState.SUCCEEDED)
    assert orch("priority", run, "high").code == 4
    assert orch("priority", run[:-2], "high").code == 3


def test_the_order_is_asked_for_only_while_priorities_differ(seeds: Seeds) -> None:
    names = [seeds.run() for _ in range(2)]
    clock, asked = FakeClock(), list[dict[str, WantedOrder]]()
    observed, config = ObservedSince(clock), compose("tiny-gpt", ["+cluster.sbatch.nice=5"]).config

    def order() -> None:
        runs = [seeds.store.run(name) for name in names]
        jobs = [JobStatus(job_id=str(number), name="orch", state="PENDING") for number in (1, 2)]
        for number, name in enumerate(names, 1):
            seeds.store.note_attempt(name, 1, epoch=seeds.epoch, job_id=str(number))
        rows = [(run, seeds.store.attempt(run.name, 1), job) for run, job in zip(runs, jobs, strict=True)]
        order_pending(rows, lambda digest: config, observed, lambda wanted: asked.append(dict(wanted)) or [])  # type: ignore[func-returns-value]

    def set_priority(value: int) -> None:
        run = seeds.store.run(names[1])
        seeds.store.note_run(names[1], epoch=seeds.epoch, now=1.0, identity=run.identity | {"priority": value})

    order()
    assert asked == []
    set_priority(10)
    order()
    assert asked == [{"1": WantedOrder(rank=0, nice=5), "2": WantedOrder(rank=10, nice=5)}]
    clock.now += 5
    order()
    assert len(asked) == 1  # once a minute
    clock.now += 60
    order()
    assert len(asked) == 2
    set_priority(0)  # nice values go back once
    clock.now += 5
    order()
    assert asked[2:] == [{"1": WantedOrder(rank=0, nice=5), "2": WantedOrder(rank=0, nice=5)}]
    clock.now += 600
    order()
    assert len(asked) == 3


def test_launches_follow_priority(seeds: Seeds) -> None:
    names = [seeds.run() for _ in range(3)]
    seeds.store.note_run(names[1], epoch=seeds.epoch, now=1.0, identity={"priority": 10})
    runs = by_priority(seeds.store.run(name) for name in names)
    assert [run.name for run in runs] == [names[1], names[0], names[2]]
    assert [run_priority(run) for run in runs] == [10, 0, 0]
    assert configured_nice(compose("tiny-gpt", ["+cluster.sbatch.nice=true"]).config) == 100
