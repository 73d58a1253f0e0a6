"""Features of a site's Slurm: asked for once, and never assumed."""

from pathlib import Path

import pytest

from orchestrator.scheduler.slurm.site_features import KEEP_FOR, SiteFeatures, enables_expedited_requeue
from tests.orchestrator.scheduler.conftest import Program, printing

ENABLED = "SlurmctldParameters     = idle_on_node_suspend,enable_expedited_requeue\nSlurmctldPort = 6817\n"


@pytest.mark.parametrize(
    ("text", "enabled"),
    [
        (ENABLED, True),
        ("SlurmctldParameters     = (null)\n", False),
        ("SlurmctldParameters = not_enable_expedited_requeue\n", False),
        ("SchedulerParameters = enable_expedited_requeue\n", False),
        ("", False),
    ],
)
def test_the_setting_is_read_from_the_configuration(text: str, enabled: bool) -> None:
    assert enables_expedited_requeue(text) is enabled


@pytest.mark.parametrize(
    ("version", "expedites"),
    [("slurm-wlm 26.05.5", True), ("slurm 25.11.3", True), ("slurm 25.11.2", False), ("slurm-wlm 22.05.8", False)],
)
def test_only_versions_in_which_it_works_are_asked(
    program: Program, tmp_path: Path, version: str, expedites: bool
) -> None:
    program("squeue", printing(tmp_path, "squeue.txt", f"{version}\n"))
    program("scontrol", printing(tmp_path, "scontrol.txt", ENABLED))
    assert SiteFeatures().expedites() is expedites


def test_the_configuration_is_asked_for_once_an_hour(program: Program, tmp_path: Path) -> None:
    now = [0.0]
    program("squeue", printing(tmp_path, "squeue.txt", "slurm 26.05.5\n"))
    program("scontrol", f"echo asked >> {tmp_path}/asked\n{printing(tmp_path, 'scontrol.txt', ENABLED)}")
    site = SiteFeatures(mono=lambda: now[0])
    for now[0] in (0.0, 60.0, KEEP_FOR - 1, KEEP_FOR + 1):
        assert site.expedites()
    assert (tmp_path / "asked").read_text().count("asked") == 2


def test_no_answer_means_no(program: Program, tmp_path: Path) -> None:
    program("squeue", printing(tmp_path, "squeue.txt", "slurm 26.05.5\n"))
    program("scontrol", "exit 1")
    assert not SiteFeatures().expedites()
