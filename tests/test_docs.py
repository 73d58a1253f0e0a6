"""The documentation keeps up with the code: verbs, failure kinds, config keys."""

import importlib.util
from pathlib import Path

from trainer.contract.outcome import FailureKind

DOCS = Path(__file__).resolve().parent.parent / "docs"


def test_every_config_key_is_documented() -> None:
    spec = importlib.util.spec_from_file_location("reference", DOCS / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    assert reference.page() == reference.TARGET.read_text(), "run: python docs/reference.py"


def test_every_failure_kind_is_documented() -> None:
    text = (DOCS / "failures.md").read_text()
    missing = [kind for kind in FailureKind if f"`{kind}`" not in text]
    assert not missing


def test_every_verb_is_documented() -> None:
    from orchestrator.cli.main import verbs

    text = (DOCS / "cli.md").read_text()
    missing = [verb for verb in verbs() if f"orch {verb}" not in text]
    assert not missing
