"""The registry's locks, tried through a real srun; the lab's nodes are one machine, which the probe must notice."""

from pathlib import Path

import pytest

from orchestrator.cli.lock_checks import SRUN
from orchestrator.registry.filesystem import Mount
from orchestrator.registry.lock_peer import FREE, HELD, Half
from orchestrator.registry.lock_probe import locks_fault, other_half, probe_file
from orchestrator.registry.lock_proof import proofs, prove_with
from tests.slurm.lab import SlurmLab

pytestmark = pytest.mark.slurm


def test_the_other_half_runs_on_a_node(lab: SlurmLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in lab.environment().items():
        monkeypatch.setenv(key, value)
    path = tmp_path / "registry.db"
    with probe_file(path) as probed, other_half(SRUN, probed) as there:
        half = Half(str(probed))
        assert half.do("lock") == FREE
        assert there("lock") == HELD
        assert half.do("unlock")
        assert locks_fault(half.do, there) is None
        half.close()
    mount = Mount(point="/x", kind="newfs", options=frozenset())
    found = prove_with(SRUN, path, mount, 1.0)
    assert isinstance(found, str)
    assert "this same machine" in found
    assert proofs(path) == []
