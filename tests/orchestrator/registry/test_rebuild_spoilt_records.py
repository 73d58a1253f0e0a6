"""A record that a person or a program has spoilt: the rest of the run directory has it all, too."""

import json
from typing import Any

import pytest

from orchestrator.registry.store import Store
from orchestrator.registry_rebuild.rebuild import rebuild
from tests.orchestrator.registry.test_rebuild import live_through_two_attempts, lose

Desk = Any
DAMAGED_RECORDS = ["null", "[" * 100_000, "step", "created_at"]


@pytest.mark.parametrize("damage", DAMAGED_RECORDS, ids=lambda words: words[:10])
def test_a_record_that_somebody_has_spoilt_is_made_from_the_rest(desk: Desk, damage: str) -> None:
    folder = live_through_two_attempts(desk)
    name = folder.name
    lose(desk)
    if damage in ("step", "created_at"):
        fields = json.loads(folder.record.read_text())
        fields["run"][damage] = 10**30
        folder.record.write_text(json.dumps(fields))
    else:
        folder.record.write_text(damage)
    assert rebuild(desk.path, [desk.root], now=50.0) == 1
    with Store.open(desk.path) as store:
        assert store.run(name).step < 1000
        assert store.run(name).created_at == 1.0
