"""The nouns: config, data, ckpt, nodes, db, controller install, doctor."""

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from checkpointing.storage.backends import LocalStorage
from orchestrator.cli.cluster import controller, crontab, doctor
from orchestrator.controller import service
from orchestrator.controller.reconcile import TickReport
from orchestrator.errors import SlurmUnreachable
from orchestrator.home import make_state_home
from orchestrator.states import RunState
from tests.checkpointing.made_checkpoint import make
from tests.orchestrator.cli.conftest import Patch, Seeds, Type
from tests.orchestrator.ordinary_user import folder_of_an_ordinary_user
from trainer.protocol.token_shards import TokenIndex


def test_config_show_and_validate(orch: Type) -> None:
    shown = orch("config", "show", "tiny-gpt", "train.steps=7")
    (line,) = [line for line in shown.out.splitlines() if line.startswith("train.steps = 7")]
    assert "override" in line
    data = orch("config", "show", "tiny-gpt", "train.steps=7", "--json").data
    assert data["config"]["train"]["steps"] == 7
    assert set(data) == {"digest", "config", "origins"}
    valid = orch("config", "validate", "tiny-gpt", "train.steps=7", "--json").data
    assert valid == {"valid": True, "digest": data["digest"]}


def test_config_diff_of_presets_runs_and_digests(orch: Type, seeds: Seeds, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("includes: [tiny-gpt]\nname: tiny-gpt\ntrain: {steps: 7}\n")
    (row,) = [row for row in orch("config", "diff", "tiny-gpt", mine, "--json").data if row["key"] == "train.steps"]
    assert row["second"] == 7
    run = seeds.run()
    other = seeds.store.put_config({"name": "tiny", "train": {"steps": 300}})
    changed = [{"key": "train.steps", "first": 200, "second": 300}]
    assert orch("config", "diff", run, other, "--json").data == changed
    assert orch("config", "diff", seeds.digest[:8], other, "--json").data == changed
    assert orch("config", "diff", run, seeds.digest, "--json").data == []
    assert orch("config", "diff", run, "no-such-thing").code in (2, 3)


def test_data_prepare(orch: Type, tmp_path: Path) -> None:
    text, out = tmp_path / "text", tmp_path / "tokens"
    text.mkdir()
    (text / "a.txt").write_text("to be or not to be")
    done = orch("data", "prepare", text, "--out", out, "--json")
    assert done.code == 0
    assert done.data["tokens"] == TokenIndex.read(out).tokens == 19
    assert done.data["fingerprint"] == TokenIndex.read(out).fingerprint
    missing = orch("data", "prepare", tmp_path / "nothing", "--out", out)
    assert missing.code == 3
    assert "nothing" in missing.err
    (text / "b.txt").write_text("that is the question")
    assert orch("data", "prepare", text, "--out", out).code == 2
    assert TokenIndex.read(out).tokens == 19


@pytest.fixture
def saved(seeds: Seeds) -> tuple[str, Path]:
    run = seeds.run()
    root = seeds.root / run / "checkpoints"
    root.mkdir(parents=True)
    for step in (50, 100):
        name = make(LocalStorage(root), step, nonce="0123abcd", now=time.time())
    return run, root / name


def test_ckpt_verify_of_sound_checkpoints(orch: Type, saved: tuple[str, Path]) -> None:
    run, newest = saved
    done = orch("ckpt", "verify", run, "--json")
    assert done.code == 0
    (report,) = done.data
    assert (report["name"], report["ok"], report["faults"], report["level"]) == (newest.name, True, [], 2)
    assert "GiB/s" in orch("ckpt", "verify", f"{run}@50").out
    assert len(orch("ckpt", "verify", f"{run}@all", "--json").data) == 2
    assert [row["reason"] for row in orch("ckpt", "ls", run, "--json").data] == ["not yet in the registry"] * 2


@pytest.mark.parametrize("level", [0, 2])
def test_ckpt_verify_names_file_and_chunk_of_every_fault(orch: Type, saved: tuple[str, Path], level: int) -> None:
    run, newest = saved
    victim = newest / "__0_0.distcp"
    data = victim.read_bytes()
    victim.write_bytes(data[:-1] if level == 0 else data[:10] + b"!" + data[11:])
    bad = orch("ckpt", "verify", f"{run}@latest", "--level", level)
    assert bad.code == 7
    assert f"{newest.name}: INVALID" in bad.out
    assert "__0_0.distcp" in bad.out
    assert level == 0 or "chunk 0" in bad.out
    as_json = orch("ckpt", "verify", f"{run}@100", "--level", level, "--json")
    assert as_json.code == 7
    assert as_json.data[0]["faults"][0]["file"] == "__0_0.distcp"
    assert orch("ckpt", "verify", f"{run}@50").code == 0


def test_unreadable_file_is_not_invalid(orch: Type) -> None:
    with folder_of_an_ordinary_user() as folder:
        name = make(LocalStorage(folder), 100, nonce="0123abcd", now=time.time())
        (folder / name / "__0_0.distcp").chmod(0)
        denied = orch("ckpt", "verify", folder / name)
        (row,) = orch("ckpt", "verify", folder / name, "--json").data
        (folder / name / "__1_0.distcp").write_bytes(b"")
        damaged = orch("ckpt", "verify", folder / name)
    assert f"{name}: UNREADABLE" in denied.out
    assert (denied.code, row["ok"], row["unreadable"]) == (4, False, True)
    assert "ermission denied" in row["faults"][0]["reason"]
    assert f"{name}: INVALID" in damaged.out
    assert damaged.code == 7


def test_ckpt_verify_of_a_step_that_is_not_there(orch: Type, seeds: Seeds, saved: tuple[str, Path]) -> None:
    none = orch("ckpt", "verify", f"{saved[0]}@77")
    assert (none.code, "100, 50" in none.err) == (3, True)
    assert "no committed checkpoint" in orch("ckpt", "verify", seeds.run("empty")).err
    assert orch("ckpt", "verify", f"{saved[0]}@soon").code == 2


def test_ckpt_ls_of_a_registered_checkpoint(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    seeds.checkpoint(run, 100)
    (seeds.root / run / "checkpoints").mkdir(parents=True)
    (row,) = orch("ckpt", "ls", run, "--json").data
    assert (row["step"], row["trust"], row["attempt"]) == (100, "VERIFIED", 1)
    assert {"step", "trust", "bytes", "path", "attempt"} <= set(row)
    assert "100\t" in orch("ckpt", "ls", run).out


def test_nodes_release_takes_an_exclusion_back(orch: Type, seeds: Seeds) -> None:
    now = time.time()
    run = seeds.run(state=RunState.SUCCEEDED)
    cluster = seeds.store.run(run).cluster
    seeds.store.saw_node("n2", cluster, epoch=seeds.epoch, now=now, failure="it hung")
    seeds.store.exclude_node("n2", cluster, now + 3600, "it hung", epoch=seeds.epoch, now=now)
    seeds.drop_lease()
    (row,) = orch("nodes", "release", "n2", "--no-controller", "--json").data
    assert row == {"node": "n2", "answer": "n2 may be used again"}
    (node,) = orch("nodes", "ls", "--json").data
    assert (node["excluded_until"], node["reason"]) == (None, "released by a person")
    assert orch("nodes", "release", "n2", "--no-controller").out == "n2 is not excluded\n"
    assert orch("nodes", "release", "n7", "--no-controller").code == 3


def test_db_backup(orch: Type, seeds: Seeds, home: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    run = seeds.run()
    assert orch("db", "path").out == f"{home / 'registry.db'}\n"
    copy = tmp_path / "copy.db"
    assert orch("db", "backup", copy).code == 0
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    monkeypatch.setenv("ORCH_REGISTRY", str(copy))
    assert orch("show", run, "--json").data["run"] == run
    assert orch("db", "backup", copy).code == 2
    assert orch("db", "rebuild").code == 2
    assert orch("db", "rebuild", "--root", tmp_path / "nowhere").code == 3


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: Patch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("crontab", "scrontab"):
        table = tmp_path / f"{name}.table"
        program = folder / name
        program.write_text(
            f'#!/bin/sh\nif [ "$1" = -l ]; then [ -f {table} ] && exec cat {table}; '
            f'echo "no crontab for you" >&2; exit 1; fi\nexec cat > {table}\n'
        )
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return tmp_path


def test_install_into_crontab(orch: Type, tables: Path) -> None:
    table = tables / "crontab.table"
    table.write_text("0 4 * * * backup\n")
    shown = orch("controller", "install", "--via", "cron", "--print")
    assert "controller tick" in shown.out
    assert table.read_text() == "0 4 * * * backup\n"
    first = orch("controller", "install", "--via", "cron")
    assert "installed" in first.err
    written = table.read_text()
    assert written.startswith("0 4 * * * backup\n")
    assert written.count("controller tick") == 1
    assert "nothing to change" in orch("controller", "install", "--via", "cron").err
    assert orch("controller", "install", "--via", "cron", "--every", 5).code == 0
    assert table.read_text().count("controller tick") == 1
    assert f"{os.getuid() % 5}-59/5 * * * *" in table.read_text()
    assert orch("controller", "install", "--via", "cron", "--remove").code == 0
    assert table.read_text() == "0 4 * * * backup\n"


def test_install_into_scrontab_brings_its_options(orch: Type, home: Path, tables: Path) -> None:
    assert orch("controller", "install", "--via", "scrontab").code == 0
    text = (tables / "scrontab.table").read_text()
    mark, *options, entry = text.splitlines()
    assert (mark.startswith(crontab.MARK), str(home / "registry.db") in mark) == (True, True)
    log = home / "controller-tick.log"
    assert options == ["#SCRON --job-name=orch-controller", "#SCRON --time=00:10:00", f"#SCRON --output={log}"]
    assert entry.startswith(f"* * * * * umask 077; sleep {os.getuid() % crontab.SPREAD}; ORCH_HOME=")
    assert entry.endswith(f" -m orchestrator.cli.main controller tick --quiet >>{log} 2>&1")
    assert (home / "controller-tick.log").stat().st_mode & 0o077 == 0
    assert crontab.without(text.splitlines()) == []


def test_cron_entry(orch: Type, tables: Path, monkeypatch: Patch) -> None:
    strange = tables / "100%$HOME"
    strange.mkdir()
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{strange}")
    mark, entry = orch("controller", "install", "--via", "cron", "--print").out.splitlines()
    assert mark.startswith(crontab.MARK)
    assert "/100\\%$HOME'" in entry


def test_scrontab_template_is_not_a_job_template(orch: Type) -> None:
    for name in ("controller", "controller.scrontab"):
        refused = orch("submit", "tiny-gpt", f"cluster.templates=[{name}]", "cluster.kind=slurm", "--print-sbatch")
        assert (refused.code, "no template" in refused.err) == (2, True)
        assert "controller" not in refused.err.partition("there are")[2]


@pytest.mark.parametrize("via", ["cron", "scrontab"])
def test_cron_runs(orch: Type, home: Path, tables: Path, via: str, monkeypatch: Patch) -> None:
    slurm = tables / "slurm bin"
    slurm.mkdir()
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{slurm}:/not/there")
    monkeypatch.setenv("SLURM_CONF", "/opt/slurm/slurm.conf")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/slurm/lib")
    monkeypatch.setattr(sys, "executable", str(tables / "say"))
    (tables / "say").write_text('#!/bin/sh\necho "$PATH|$SLURM_CONF|$LD_LIBRARY_PATH"\n')
    (tables / "say").chmod(0o755)
    line = orch("controller", "install", "--via", via).out.splitlines()[-1].removeprefix("* * * * * ")
    (home / "controller-tick.log").unlink()  # as after a tidying up
    subprocess.run(["/bin/sh", "-c", line], env={"PATH": "/usr/bin:/bin"}, check=True, timeout=20)
    log = home / "controller-tick.log"
    path, conf, libraries = log.read_text().strip().split("|")
    assert path.endswith(f":{slurm}")
    assert (conf, libraries) == ("/opt/slurm/slurm.conf", "/opt/slurm/lib")
    assert log.stat().st_mode & 0o077 == 0


def test_folders_above_its_state_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = make_state_home({"XDG_STATE_HOME": str(tmp_path / "local" / "state")})
    finally:
        os.umask(before)
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (made, *made.parents[:2])] == [0o700] * 3


@pytest.mark.parametrize("said", ["", "crontab: you are not allowed to use this program"])
def test_unreadable_crontab_is_not_replaced(orch: Type, tables: Path, said: str) -> None:
    table = tables / "crontab.table"
    table.write_text("0 4 * * * backup\n")
    program = tables / "bin" / "crontab"
    program.write_text(f'#!/bin/sh\n[ "$1" = -l ] && {{ echo "{said}" >&2; exit 1; }}\nexec cat > {table}\n')
    refused = orch("controller", "install", "--via", "cron")
    assert refused.code == 4
    assert said in refused.err
    assert table.read_text() == "0 4 * * * backup\n"


def test_without_cron_install_says_what_else(orch: Type, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    refused = orch("controller", "install", "--via", "cron")
    assert refused.code == 4
    assert "--via scrontab" in refused.err


def test_no_accounting_is_known_not_mended() -> None:
    def silent(command: list[str]) -> str:
        raise SlurmUnreachable("sacct got no answer")

    for settings in ({"AccountingStorageType": "accounting_storage/none"}, {"AccountingStorageType": "x/slurmdbd"}):
        found = doctor.accounting(settings, silent)
        assert found.level == doctor.WARN
        assert "heartbeats" in found.text


def test_doctor_reports_missing_slurm_conf(tmp_path: Path, monkeypatch: Patch) -> None:
    for name in doctor.COMMANDS:
        (tmp_path / name).touch(mode=0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    (found,) = doctor.slurm(None, wanted=False, jobs={})
    assert (found.level, f"SLURM_CONF={tmp_path}/slurm.conf: no such file" in found.text) == (doctor.FAIL, True)


def test_doctor_without_slurm(orch: Type, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    seen = orch("doctor", "--root", tmp_path / "runs", "--json")
    assert seen.code == 0
    assert seen.data["ok"] is True
    names = {check["name"] for check in seen.data["checks"]}
    assert {"python", "torch", "state", "registry", "root", "slurm", "controller"} <= names
    assert not (tmp_path / "runs").exists()


def test_doctor_names_what_must_be_mended(orch: Type, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    bad_root = orch("doctor", "--root", blocked / "runs")
    assert bad_root.code == 4
    assert "FAIL" in bad_root.out
    assert "cluster.root" in bad_root.out
    wanted = tmp_path / "mine.yaml"
    wanted.write_text("includes: [tiny-gpt]\ncluster: {kind: slurm}\n")
    assert orch("doctor", "--config", wanted).code == 4
    old = doctor.python((3, 10, 1))
    assert (old.level, "3.11" in old.hint) == (doctor.FAIL, True)


def test_overview_json(orch: Type, seeds: Seeds) -> None:
    seeds.run()
    seeds.run(state=RunState.FAILED, reason="a bug")
    answer = json.loads(orch("--json").out)
    assert answer["schema"] == "orch.overview/1"
    assert [row["run"] for row in answer["data"]["needs_you"]] == ["tiny-2"]


def test_db_rebuild_brings_the_runs_back(orch: Type, seeds: Seeds, home: Path) -> None:
    seeds.drop_lease()
    seeds.root.mkdir()
    rebuilt = orch("db", "rebuild", seeds.root, "--json").data
    assert {key: rebuilt[key] for key in ("path", "runs")} == {"path": str(home / "registry.db"), "runs": 0}
    assert Path(rebuilt["old"]).read_bytes().startswith(b"SQLite")
    assert "the old registry is now " in orch("db", "rebuild", seeds.root).err


def test_controller_status_and_tick(orch: Type, home: Path) -> None:
    idle = orch("controller", "status")
    assert idle.code == 0
    assert idle.out.startswith("no controller is running")
    assert orch("controller", "tick").out == "0 live runs\n"
    assert orch("controller", "tick", "--json").data["acted"] is True
    assert orch("controller", "stop").out == "none is running\n"
    assert orch("controller", "status", "--json").data["alive"] is False


def test_pass_without_answer(orch: Type, home: Path, monkeypatch: Patch) -> None:
    report = TickReport(live=1, changed=False, unreachable=("slurm",))
    monkeypatch.setattr(service, "tick_once", lambda path, kind: report if kind == "slurm" else None)
    monkeypatch.setattr(controller, "kinds", lambda: ("slurm", "local"))
    silent = orch("controller", "tick")
    assert silent.code == 5
    assert "slurm does not answer" in silent.out
    as_json = orch("controller", "tick", "--json")
    assert as_json.code == 5
    assert as_json.data["report"]["unreachable"] == ["slurm"]
