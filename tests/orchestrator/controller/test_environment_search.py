"""A controller that its Slurm does not answer finds the environment in which it does; Slurm is a script that tells."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.controller.environment_search import TRY_AGAIN, EnvironmentSearch, SlurmWatch, adopt_at_start
from orchestrator.controller.reconcile import Controller, TickReport
from orchestrator.controller.slurm_contact import read_contact, write_contact
from orchestrator.registry.lease import this_process
from orchestrator.registry.records import NewRun, Run
from orchestrator.registry.store import Store
from orchestrator.scheduler.scheduler_instance import read_instance
from orchestrator.scheduler.slurm.client_environment import RECORDED, ClientEnvironment
from tests.fakes.new_runs import take_lease

SHOWN = """ClusterName             = lab
SlurmctldHost[0]        = login1(127.0.0.1)
SlurmctldPort           = 6817
StateSaveLocation       = /var/spool
"""
LAB = read_instance(SHOWN)
SCONTROL = '#!/bin/sh\necho "$SLURM_CONF" >> "$0.asked"\nexec cat "$SLURM_CONF"\n'


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of Slurm's commands on PATH; `scontrol show config` prints the file that SLURM_CONF names."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("scontrol", SCONTROL), ("sbatch", "#!/bin/sh\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "moved.conf"))
    for name in ("SLURM_CLUSTERS", "SLURM_CONF_SERVER", "SLURM_JWT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "lab.conf").write_text(SHOWN)
    (tmp_path / "other.conf").write_text(SHOWN.replace("lab", "library"))
    return folder


def client(clients: Path, conf: str) -> dict[str, object]:
    """What a submitter had whose SLURM_CONF was this file."""
    sbatch, place = str(clients / "sbatch"), str(clients.parent / conf)
    return {RECORDED: ClientEnvironment(variables={"SLURM_CONF": place}, sbatch=sbatch).to_json()}


def submitted(store: Store, identity: dict[str, object], scheduler: str = LAB, cluster: str = "slurm") -> Run:
    new = NewRun(
        slug="a", cluster=cluster, root=store.database.path.parent, config_digest=store.put_config({"name": "a"}),
        total_steps=1, identity=identity, scheduler=scheduler,
    )  # fmt: skip
    return store.create_run(new, now=time.time(), nonce="0badcafe")[0]


def asked(clients: Path) -> list[str]:
    """The files that scontrol was asked with, in order."""
    log = clients / "scontrol.asked"
    return [Path(line).name for line in log.read_text().splitlines()] if log.exists() else []


def test_the_first_environment_in_which_that_very_slurm_answers_is_taken_over(tmp_path: Path, clients: Path) -> None:
    with Store.open(tmp_path / "registry.db") as store:
        named = [submitted(store, client(clients, conf)) for conf in ("lab.conf", "other.conf", "gone.conf")]
        runs = [*reversed(named), submitted(store, {}), submitted(store, client(clients, "lab.conf"), cluster="local")]
        assert EnvironmentSearch().adopt(runs, LAB) == named[0].name
    assert os.environ["SLURM_CONF"] == str(tmp_path / "lab.conf")
    assert asked(clients) == ["gone.conf", "other.conf", "lab.conf"], "another Slurm is not meant"


def test_any_slurm_will_do_where_it_is_not_known_which_is_meant(tmp_path: Path, clients: Path) -> None:
    with Store.open(tmp_path / "registry.db") as store:
        run = submitted(store, client(clients, "other.conf"), "")
        assert EnvironmentSearch().adopt([run], "slurm@login1?") == run.name


def test_what_did_not_work_is_tried_again_after_a_while(tmp_path: Path, clients: Path) -> None:
    now, between = [0.0], [0]

    def count() -> None:
        between[0] += 1

    search = EnvironmentSearch(count, lambda: now[0])
    with Store.open(tmp_path / "registry.db") as store:
        runs = [submitted(store, client(clients, f"gone-{number}.conf")) for number in range(5)]
    for at, tried in ((0.0, 3), (1.0, 5), (2.0, 5), (TRY_AGAIN + 2.0, 8)):
        now[0] = at
        assert search.adopt(runs, LAB) == ""
        assert (len(asked(clients)), between[0]) == (tried, tried)


def test_a_daemon_writes_down_that_it_is_not_answered_and_goes_on_in_another_environment(
    tmp_path: Path, clients: Path
) -> None:
    path = tmp_path / "registry.db"
    with Store.open(path) as store:
        controller = Controller(store, {})
        lease = take_lease(store, str(this_process()), time.time(), 60.0, LAB)
        controller.actor.lease = lease
        watch = SlurmWatch(path, "slurm", controller)
        good = TickReport(live=1, changed=False)
        mute = replace(good, unreachable=("slurm",), silence=("scontrol gave no answer within 10 s",))
        assert not watch.after(good)
        contact = read_contact(path, lease)
        assert contact is not None
        assert (contact.pid, contact.silence) == (os.getpid(), "")
        assert not watch.after(mute), "nobody has another one"
        told = read_contact(path, lease)
        assert told is not None
        assert told.silence == "scontrol gave no answer within 10 s"
        assert told.client.variables == {"SLURM_CONF": str(tmp_path / "moved.conf")}
        submitted(store, client(clients, "lab.conf"))
        assert watch.after(mute)
        assert set(controller.schedulers) == set(controller.actor.schedulers) == {"slurm"}, "it has an sbatch now"
        after = read_contact(path, lease)
        assert after is not None
        assert (after.client.variables, after.silence) == ({"SLURM_CONF": str(tmp_path / "lab.conf")}, "")
        # Of a controller that is gone nothing counts any more.
        assert read_contact(path, replace(lease, holder=lease.holder.replace(str(os.getpid()), "1"))) is None
        assert read_contact(path, None) is None


def test_a_pass_that_cron_starts_without_slurms_environment_finds_it(tmp_path: Path, clients: Path) -> None:
    path = tmp_path / "registry.db"
    adopt_at_start(path, "slurm")  # there is no registry yet
    with Store.open(path) as store:
        submitted(store, client(clients, "lab.conf"))
    adopt_at_start(path, "local")
    assert os.environ["SLURM_CONF"] == str(tmp_path / "moved.conf")
    adopt_at_start(path, "slurm")
    assert os.environ["SLURM_CONF"] == str(tmp_path / "lab.conf")
    before = len(asked(clients))
    adopt_at_start(path, "slurm")
    assert len(asked(clients)) == before + 1, "it is answered, and looks no further"


def test_a_file_that_is_no_contact_is_none(tmp_path: Path, clients: Path) -> None:
    path = tmp_path / "registry.db"
    with Store.open(path) as store:
        lease = store.take_lease(str(this_process()), time.time(), 60.0, LAB)
    assert read_contact(path, lease) is None
    write_contact(path, LAB, "")
    (file,) = tmp_path.glob(".registry.db.slurm.*")
    for text in ("", "[]", '{"pid": 1}', '{"pid": 1, "client": 3, "silence": ""}'):
        file.write_text(text)
        assert read_contact(path, lease) is None
