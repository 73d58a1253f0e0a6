"""The registry's locks, tried through a real srun; the lab's nodes are one machine, which the probe must notice."""

from pathlib import Path

import pytest

from orchestrator.cli.cluster.machine_checks import SRUN
from orchestrator.registry.locks.filesystem import Mount
from orchestrator.registry.locks.lock_peer import FREE, HELD, LockPeer
from orchestrator.registry.locks.lock_probe import lock_fault, other_peer, probe_file
from orchestrator.registry.locks.lock_proof import proofs, prove_with
from tests.slurm.lab import SlurmLab

pytestmark = pytest.mark.slurm


def test_the_other_half_runs_on_a_node(lab: SlurmLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in lab.environment().items():
        monkeypatch.setenv(key, value)
    path = tmp_path / "registry.db"
    with probe_file(path) as probed, other_peer(SRUN, probed) as there:
        half = LockPeer(str(probed))
        assert half.do("lock") == FREE
        assert there("lock") == HELD
        assert half.do("unlock")
        assert lock_fault(half.do, there) is None
        half.close()
    mount = Mount(point="/x", kind="newfs", options=frozenset())
    found = prove_with(SRUN, path, mount, 1.0)
    assert isinstance(found, str)
    assert "this same machine" in found
    assert proofs(path) == []
