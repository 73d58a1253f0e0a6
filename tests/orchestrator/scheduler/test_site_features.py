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


def scontrol(folder: Path, version: str, config: str = ENABLED) -> str:
    """Return the body of a scontrol that counts the questions about the configuration in `asked`."""
    shown = printing(folder, "config.txt", config)
    return f"""[ "$1" = --version ] && {{ echo "{version}"; exit; }}
echo asked >> {folder}/asked
{shown}"""


@pytest.mark.parametrize(
    ("version", "expedites"),
    [("slurm-wlm 26.05.5", True), ("slurm 25.11.3", True), ("slurm 25.11.2", False), ("slurm-wlm 22.05.8", False)],
)
def test_only_versions_in_which_it_works_are_asked(
    program: Program, tmp_path: Path, version: str, expedites: bool
) -> None:
    program("scontrol", scontrol(tmp_path, version))
    assert SiteFeatures().expedites() is expedites
    assert (tmp_path / "asked").exists() is expedites


def test_the_configuration_is_asked_for_once_an_hour(program: Program, tmp_path: Path) -> None:
    now = [0.0]
    program("scontrol", scontrol(tmp_path, "slurm 26.05.5"))
    site = SiteFeatures(mono=lambda: now[0])
    for now[0] in (0.0, 60.0, KEEP_FOR - 1, KEEP_FOR + 1):
        assert site.expedites()
    assert (tmp_path / "asked").read_text().count("asked") == 2


def test_no_answer_means_no(program: Program, tmp_path: Path) -> None:
    program("scontrol", scontrol(tmp_path, "slurm 26.05.5") + "\nexit 1")
    assert not SiteFeatures().expedites()


def test_without_clients_the_version_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert SiteFeatures().version() == ()
    assert not SiteFeatures().expedites()
