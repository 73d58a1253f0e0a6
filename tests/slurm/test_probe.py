"""`orch doctor --nodes` on the real Slurm: collectives and storage are measured by a short job."""

from pathlib import Path

import pytest

from tests.end_to_end.user import User
from tests.slurm.lab import SlurmLab

pytestmark = [pytest.mark.slurm, pytest.mark.proof, pytest.mark.multi, pytest.mark.timeout(500)]


def test_doctor_measures_two_nodes_with_a_short_job(lab: SlurmLab, user: User, tmp_path: Path) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text(
        f"includes: [tiny-gpt]\ncluster: {{kind: slurm, root: {user.root}, partition: low, ranks_per_node: 1}}\n"
        "parallel: {tp: 1, dp_shard: 0}\n"
    )
    probe = user.ask("doctor", "--config", str(config), "--nodes", "2", timeout=400)["probe"]
    assert (probe["nodes"], probe["ranks"], probe["backend"]) == (2, 4, "gloo")
    assert {one["scope"] for one in probe["collectives"]} == {"world", "within nodes", "between nodes"}
    assert all(one["seconds"] > 0 for one in probe["collectives"])
    assert {(one["place"], one["nodes"], one["error"]) for one in probe["storage"]} == {
        ("run root", 1, ""), ("run root", 2, ""),
    }  # fmt: skip
    (attempt,) = user.show(probe["run"])["attempts"]
    assert len(attempt["nodes"]) == 2
    assert not list(user.root.glob(".orch-probe-*"))
