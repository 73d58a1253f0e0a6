"""Identity of a Slurm: distinct between clusters, stable across restarts, unknown without an answer."""

import socket
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from orchestrator.errors import Precondition, SlurmUnreachable
from orchestrator.scheduler.available_schedulers import make_instance
from orchestrator.scheduler.scheduler_instance import (
    KEEP_FOR,
    SlurmInstance,
    is_known,
    local_instance,
    read_instance,
    unknown_instance,
)

SHOWN = """Configuration data as of 2026-11-22T00:04:42
AccountingStorageHost   = 127.0.0.1
BOOT_TIME               = 2026-11-22T00:04:41
ClusterName             = lab
SlurmctldAddr           = (null)
SlurmctldHost[0]        = login1(127.0.0.1)
SlurmctldLogFile        = /var/log/slurm/slurmctld.log
SlurmctldPort           = 26874
StateSaveLocation       = /var/spool/slurmctld

Slurmctld(primary) at login1 is UP
"""


def test_the_name_is_readable_and_bears_a_digest() -> None:
    name, _, digest = read_instance(SHOWN).partition("/")
    assert name == "lab@login1:26874"
    assert len(digest) == 8


@pytest.mark.parametrize(
    ("before", "after"),
    [("26874", "26875"), ("login1(", "login2("), ("= lab", "= lib"), ("/var/spool/slurmctld", "/var/spool/other")],
)
def test_another_cluster_has_another_name(before: str, after: str) -> None:
    assert read_instance(SHOWN.replace(before, after)) != read_instance(SHOWN)


def test_a_restart_a_fail_over_and_a_backup_controller_keep_the_name() -> None:
    later = SHOWN.replace("00:04:41", "09:00:00").replace("00:04:42", "09:10:00")
    backed = later.replace("SlurmctldLogFile", "SlurmctldHost[1]        = login9\nSlurmctldLogFile")
    failed_over = backed.replace("(primary) at login1 is UP", "(primary) at login1 is DOWN")
    assert {read_instance(text) for text in (SHOWN, later, backed, failed_over)} == {read_instance(SHOWN)}


@pytest.mark.parametrize(
    "text", ["", "nonsense", SHOWN.replace("StateSave", "Other"), SHOWN.replace("= lab", "= (null)")]
)
def test_an_unreadable_instance_has_no_name(text: str) -> None:
    assert read_instance(text) == ""


class Commands:
    """Fake scontrol; `text` None means no answer."""

    def __init__(self) -> None:
        self.text: str | None = SHOWN
        self.asked = 0

    def __call__(self, command: list[str]) -> CompletedProcess[str]:
        assert command == ["scontrol", "show", "config"]
        self.asked += 1
        if self.text is None:
            raise SlurmUnreachable("scontrol gave no answer within 10 s")
        failed = not self.text
        return CompletedProcess(command, int(failed), self.text, "Unable to contact" if failed else "")


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "slurm.conf"
    path.write_text("ClusterName=lab")
    monkeypatch.setenv("SLURM_CONF", str(path))
    return path


def test_an_answer_is_kept_for_a_while_and_asked_for_again(conf: Path) -> None:
    commands, now = Commands(), [0.0]
    instance = SlurmInstance(commands, lambda: now[0])
    assert [instance() for _ in range(5)] == [read_instance(SHOWN)] * 5
    assert commands.asked == 1
    now[0] = KEEP_FOR
    commands.text = SHOWN.replace("26874", "1")
    assert instance() == read_instance(commands.text)


@pytest.mark.parametrize("text", [None, ""])
def test_silence_is_unknown_with_its_words_and_is_not_kept(conf: Path, text: str | None) -> None:
    commands = Commands()
    commands.text = text
    instance = SlurmInstance(commands, lambda: 0.0)
    assert instance() == ""
    assert "scontrol" in instance.silence
    commands.text = SHOWN
    assert (instance(), instance.silence) == (read_instance(SHOWN), "")


def test_another_configuration_is_seen_at_once(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = Commands()
    instance = SlurmInstance(commands, lambda: 0.0)
    instance()
    conf.write_text("ClusterName=library")
    instance()
    monkeypatch.setenv("SLURM_CLUSTERS", "far")
    instance()
    monkeypatch.setenv("SLURM_CONF", "/nowhere")
    instance()
    assert commands.asked == 4


def test_an_unknown_one_owns_nothing() -> None:
    assert local_instance() == f"local@{socket.gethostname()}"
    assert [is_known(name) for name in ("", unknown_instance("slurm"), local_instance())] == [False, False, True]


def test_an_unknown_kind_is_an_orch_error() -> None:
    with pytest.raises(Precondition, match="this version of orch has no scheduler `pbs`") as refused:
        make_instance("pbs")
    assert refused.value.hint.startswith("it has slurm, local; ")
