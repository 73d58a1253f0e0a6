"""pytest plugin for the recorded run: names the current test, and records the results of all."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

_SITE = Path(sys.modules["sitecustomize"].__file__ or "").parent
_ended: dict[str, dict[str, Any]] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    (_SITE / "current").write_text(item.nodeid)
    sys.modules["sitecustomize"].COVERAGE.switch_context(item.nodeid)
    _ended[item.nodeid] = {"seconds": 0.0, "passed": True, "ranks": item.get_closest_marker("multi") is not None}
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    ended = _ended[report.nodeid]
    ended["seconds"] += report.duration if report.when != "setup" else 0.0  # what a session sets up is set up once
    ended["passed"] &= report.passed


def pytest_sessionfinish() -> None:
    (_SITE / "ended.json").write_text(json.dumps(_ended))
