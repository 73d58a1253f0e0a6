"""Pipelines, rings and experts on a made-up clock: nobody is blamed for waiting, and who hangs is named."""

from collections.abc import Callable

import pytest

from tests.trainer.agent.watch.staged_jobs import LAYOUTS
from tests.trainer.agent.watch.stalls import legal_hour, stage
from trainer.agent.watch.declare_hang import HangVerdict


def plays(layout: str, seed: int, *, records: bool) -> None:
    watch, bad = legal_hour(seed, records=records, job=LAYOUTS[layout](seed))
    assert bad is None, f"{layout}, seed {seed}, records {records}, after {watch.now:.0f} s: {bad.reason}"
    assert watch.now >= 3600
    assert watch.judged[HangVerdict.LOOK] > 5  # it was slow indeed


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hours_in_which_everything_is_slow_that_may_be(layout: str) -> None:
    plays(layout, 1, records=layout != "pipeline")


@pytest.mark.proof
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block", range(10))
def test_four_hundred_hours_of_each_layout(
    block: int, layout: str, record_property: Callable[[str, object], None]
) -> None:
    for seed in range(100 + block * 20, 120 + block * 20):
        for records in (True, False):
            plays(layout, seed, records=records)
    record_property(f"simulated hours without a false alarm ({layout})", 40)


LATER = {"experts": 5.0}
"""Seconds: where ordinary passes last for seconds, nobody looks closer as soon."""
HANGS = ("stopped", "dead", "data", "save", "forward", "backward", "spinning", "lock")


def is_named(layout: str, what: str, seed: int, *, records: bool) -> None:
    incident, found, now = stage(seed, what, records=records, job=LAYOUTS[layout](seed))
    told = f"{layout}, seed {seed}, {what}, records {records}: {incident}, {found}"
    assert found is not None, told
    assert (found.culprit, found.kind) == (incident.culprit, incident.kind), told
    assert incident.began < now <= incident.due + LATER.get(layout, 0.0), f"{told}, at {now}"


@pytest.mark.parametrize("what", HANGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_who_hangs_is_named_in_time(layout: str, what: str) -> None:
    for seed in range(2):
        is_named(layout, what, seed, records=seed == 0 or layout == "experts")


@pytest.mark.proof
@pytest.mark.parametrize("what", HANGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_hundreds_who_hang_are_named_in_time(
    layout: str, what: str, record_property: Callable[[str, object], None]
) -> None:
    for seed in range(1000, 1050):
        # Who waits for whom in an exchange only records show.
        for records in (True,) if layout == "experts" else (True, False):
            is_named(layout, what, seed, records=records)
    record_property(
        f"simulated hangs ({layout}, {what}) with the right culprit, kind and time", 50 if layout == "experts" else 100
    )
