"""Valid and invalid values of `restore_tests`."""

import pytest

from orchestrator.config.compose import compose
from orchestrator.config.restore_tests_config import interval_seconds, is_schedule
from orchestrator.errors import ConfigError


@pytest.mark.parametrize("every", ["off", "nightly", "30m", "6h", "1d", "0 3 * * *", "*/15 1-5 * * mon"])
def test_schedules(every: str) -> None:
    assert is_schedule(every)
    assert compose("tiny-gpt", [f"restore_tests.every={every}"]).config.restore_tests.every == every


@pytest.mark.parametrize("every", ["", "0h", "1w", "daily", "0 3 * *", "99 * * * *", "5"])
def test_invalid_schedules(every: str) -> None:
    assert not is_schedule(every)


def test_intervals_in_seconds() -> None:
    assert [interval_seconds(every) for every in ("30m", "6h", "1d", "nightly")] == [1800.0, 21600.0, 86400.0, None]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("restore_tests.every=1w", "must be off, nightly, an interval"),
        ("restore_tests.sample=best", "must be one of unproven, newest, oldest, random"),
        ("restore_tests.layouts=[2y2]", "2y2: must be same, a number of ranks, or NODESxRANKS"),
        ("restore_tests.layouts=[0]", "0: must be same"),
        ("restore_tests.layouts=[]", "is empty"),
        ("restore_tests.layouts=[same,3]", "3: train.batch_size=16: must be a multiple of the 3 data-parallel ranks"),
        ("restore_tests.layouts=[3]", "set restore_tests.layouts=[same]"),
        ("restore_tests.steps=0", "must be from 1 to 1000"),
        ("restore_tests.level=1", "must be 2, 3 or 4"),
        ("restore_tests.budget=-1", "must be 0 or a share"),
        ("restore_tests.max_parallel=0", "must be at least 1"),
        ("+restore_tests.cluster.partitin=low", "did you mean restore_tests.cluster.partition?"),
        ("restore_tests.command=[python, r.py]", "is only for a `command`"),
    ],
)
def test_invalid_restore_test_settings_are_refused(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compose("tiny-gpt", [override])
    assert said in f"{refused.value.what} {refused.value.hint}"


def test_untested_layouts_are_ignored() -> None:
    config = compose("tiny-gpt", ["restore_tests.every=off", "restore_tests.layouts=[3]"]).config
    assert config.restore_tests.layouts == ("3",)
