"""Runs that nobody drives: a stand-in for the controller's service."""

import sys
from types import SimpleNamespace

import pytest


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    import orchestrator.controller

    fake = SimpleNamespace(knocks=[])
    fake.ensure_running = lambda path, kind: fake.knocks.append("ensure_running")
    fake.tick_once = lambda path, kind, **_: fake.knocks.append("tick_once")
    monkeypatch.setattr(orchestrator.controller, "service", fake, raising=False)
    monkeypatch.setitem(sys.modules, "orchestrator.controller.service", fake)
    return fake
