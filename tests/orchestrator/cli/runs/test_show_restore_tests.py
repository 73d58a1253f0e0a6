"""`orch show` of a run whose checkpoints were restored by tests, and of a run that is such a test."""

import pytest

from orchestrator.states import RunState, Trust
from tests.orchestrator.cli.conftest import Seeds, Type
from trainer.protocol.restore_test import Outcome


def test_show_lists_the_newest_five_tests_and_what_is_proven(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    for step in (100, 200):
        seeds.checkpoint(run, step, Trust.RESTORED)
    found = {"rto_seconds": 75.0, "bytes_per_second": 3 * 1024.0**2, "compared": 3}
    for number in range(4):
        seeds.restore_test(run, 100, Outcome.RESTORED, f"early {number}", age=9000.0 - number)
    seeds.restore_test(run, 200, Outcome.RESTORED, "bit for bit", age=600.0, **found)
    seeds.restore_test(run, 200, Outcome.RESTORED, "within 0.02", layout="1", age=400.0)
    seeds.restore_test(run, 200, layout="2x4", age=0.0)
    shown = orch("show", run)
    section = shown.out.partition("\nrestore tests\n")[2].splitlines()
    assert [line.split()[:3] for line in section[1:6]] == [
        ["200", "2x4", "under"], ["200", "1", "RESTORED"], ["200", "same", "RESTORED"], ["100", "same", "RESTORED"],
        ["100", "same", "RESTORED"],
    ]  # fmt: skip
    for word in ("10m00s", "1m15s", "3.0 MiB/s", "3", "bit for bit"):
        assert word in section[3]
    assert section[6] == "newest proven restorable: step 200, 6m40s ago, on same, 1"
    assert f"2 more:  orch restore-tests history {run}" in shown.err


def test_show_tells_programs_the_same(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    seeds.checkpoint(run, 100, Trust.RESTORED)
    seeds.checkpoint(run, 200, Trust.CORRUPT)
    tests = [
        seeds.restore_test(run, 200, Outcome.RESTORED, age=90.0),
        seeds.restore_test(run, 100, Outcome.RESTORED, "bit for bit", age=60.0, compared=3),
    ]
    data = orch("show", run, "--json").data
    assert [test["test"] for test in data["restore_tests"]] == tests[::-1]
    assert data["restore_tests"][0]["evidence"] == {"compared": 3}
    assert data["proven"].pop("ended_at") == data["restore_tests"][0]["ended_at"]
    assert data["proven"] == {"step": 100, "checkpoint": "step-00000100.001-0123abcd", "layouts": ["same"]}
    assert data["is_restore_test"] is None


def test_show_says_so_when_nothing_is_proven(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    assert "restored by a test" not in orch("show", run).out
    seeds.checkpoint(run, 100)
    seeds.restore_test(run, 100, Outcome.NOT_FINISHED, "no node")
    assert "\nno checkpoint of it has been restored by a test\n" in orch("show", run).out
    assert orch("show", run, "--json").data["proven"] is None
    seeds.restore_test(run, 200, Outcome.RESTORED)  # deleted since
    assert "\nno checkpoint that is there now, and good, has been restored by a test\n" in orch("show", run).out


def test_a_test_tells_what_it_restores_and_what_it_has_compared(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    steps = [{"step": 101, "loss": 3.25, "grad_norm": 1.5, "lr": 0.001}, {"step": 102, "loss": "nan"}]
    again = [{"loss": 9.0, "grad_norm": 8.0}, {"loss": 3.125, "grad_norm": 1.75, "lr": 0.002}]  # trained twice
    test = seeds.restore_test(
        run, 100, Outcome.SUSPECT, "loss of step 101 differs", layout="1", steps=steps, run_steps={"101": again}
    )
    head, _, below = orch("show", test).out.partition("\n\n")
    assert f"tests    step 100 of {run} on 1   step-00000100.001-0123abcd" in head
    assert "verdict  SUSPECT   loss of step 101 differs" in head
    title, *rows = below.partition("\n\n")[0].splitlines()
    assert title.split("  ")[0] == "STEP"
    assert [row.split() for row in rows] == [
        ["101", "3.25", "3.125", "1.5", "1.75", "0.001", "0.002"], ["102", "nan", "-", "-", "-", "-", "-"],
    ]  # fmt: skip
    told = orch("show", test, "--json").data["is_restore_test"]
    assert (told["run"], told["step"], told["layout"], told["verdict"]) == (run, 100, "1", "SUSPECT")
    assert told["evidence"]["run_steps"] == {"101": again}


def test_a_test_that_goes_on_says_so(orch: Type, seeds: Seeds) -> None:
    test = seeds.restore_test(seeds.run(), 100)
    shown = orch("show", test).out
    assert "verdict  under way\n" in shown
    assert "restored by a test" not in shown


def test_a_test_that_failed_is_not_to_be_resumed_but_begun_again(orch: Type, seeds: Seeds) -> None:
    run = seeds.run(state=RunState.FAILED, reason="a bug")
    test = seeds.restore_test(run, 100, layout="1")
    seeds.store.move_run(test, RunState.FAILED, "no memory", epoch=seeds.epoch, now=0.0)
    shown = orch("show", test)
    assert f"again:    orch ckpt restore-test {run}@100 --layout 1" in shown.err
    assert "orch resume" not in shown.err
    assert f"orch resume {run}" in orch("show", run).err


@pytest.mark.parametrize(
    "words",
    [
        ("resume", "{test}"),
        ("resume", "{test}", "train.steps=300"),
        ("submit", "--from", "{test}@100"),
        ("submit", "--from", "{test}", "--dry-run"),
        ("ckpt", "pin", "{test}"),
        ("ckpt", "verify", "{test}@all"),
        ("ckpt", "diff", "{test}", "{test}@100"),
        ("ckpt", "export", "{test}", "nowhere"),
    ],
)
def test_what_needs_a_checkpoint_is_refused_of_a_test(orch: Type, seeds: Seeds, words: tuple[str, ...]) -> None:
    run = seeds.run()
    test = seeds.restore_test(run, 100, Outcome.RESTORED, layout="1")
    refused = orch(*(word.format(test=test) for word in words))
    assert refused.code in (3, 4)
    assert refused.err.startswith(f"error: {test} is a restore test: ")
    assert f"orch ckpt restore-test {run}@100 --layout 1" in refused.err
    assert seeds.store.user_requests() == []
    assert len(seeds.store.runs()) == 2


def test_a_test_takes_no_room_and_leaves_nothing_over(orch: Type, seeds: Seeds) -> None:
    test = seeds.restore_test(seeds.run(), 100, Outcome.RESTORED)
    for verb in ("du", "gc", "ls"):
        done = orch("ckpt", verb, test, "--json")
        assert (done.code, done.data) == (0, []), verb
    assert f"{test} is a restore test, and saves nothing" in orch("ckpt", "ls", test).err
