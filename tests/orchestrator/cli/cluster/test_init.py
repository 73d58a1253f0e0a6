"""`orch init`: the settings that it writes, from the answers of Slurm's clients."""

import json
from pathlib import Path

import pytest

from orchestrator.cli.cluster import init as module
from orchestrator.cli.cluster.init import choose_settings, guess_root, settings_text
from orchestrator.config.compose import compose
from orchestrator.registry import file_systems
from orchestrator.scheduler.slurm.site_survey import NodeShape, SiteSurvey, read_partitions
from tests.orchestrator.cli.conftest import Patch, Type

PARTITIONS = """\
cpu|up|7-00:00:00|1:00:00|40|64|256000|(null)
gpu*|up|2-00:00:00|n/a|8|96|1030000+|gpu:h100:8(S:0-1)
gpu*|up|2-00:00:00|n/a|2|96|1030000|gpu:h100:8(S:0-1),nvme:1
gpu*|up|2-00:00:00|n/a|4|48|515000|gpu:a100:4
debug|drain|infinite|n/a|1|8|4000|(null)
"""
CLIENTS = {
    "sbatch": "exit 1",
    "sinfo": f"cat <<'E'\n{PARTITIONS}E",
    "scontrol": "echo 'ClusterName             = prod'",
    "sacctmgr": "case \"$*\" in *DefaultAccount*) echo m2;; *cluster=prod*) printf '%s\\n' 'prod|m1||normal,debug|' "
    "'prod|m2|gpu|normal|normal';; *) exit 1;; esac",
}


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: Patch) -> Path:
    """Slurm clients that print the answers of a large site."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in CLIENTS.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    for name in ("SCRATCH", "SLURM_CONF"):
        monkeypatch.delenv(name, raising=False)
    return folder


def test_partitions_are_read_with_the_shapes_of_their_nodes() -> None:
    cpu, gpu, debug = read_partitions(PARTITIONS + "garbage\n")
    assert (cpu.name, cpu.is_default, cpu.longest, cpu.default_time) == ("cpu", False, "7-00:00:00", "1:00:00")
    assert gpu.shapes == (
        NodeShape(nodes=10, cores=96, memory=1030000, gpus=8), NodeShape(nodes=4, cores=48, memory=515000, gpus=4),
    )  # fmt: skip
    assert (gpu.is_default, gpu.default_time, gpu.main_shape.words()) == (
        True, "", "10 nodes with 96 cores, 1006 GiB, 8 GPUs",
    )  # fmt: skip
    assert (debug.is_up, debug.longest) == (False, "")


def test_the_defaults_are_written_and_used(orch: Type, clients: Path, tmp_path: Path) -> None:
    said = orch("init", "-y")
    assert said.code == 0, said.err
    file = tmp_path / "config" / "orch" / "config.yaml"
    text = file.read_text()
    assert "partition: gpu\n" in text
    assert "account: m2\n" in text
    assert "qos" not in text
    assert "cluster.gpus_per_node=8 cluster.cpus_per_task=96 cluster.mem=0" in text
    cluster = compose("slurm-first-run").config.cluster
    assert (cluster.partition, cluster.account) == ("gpu", "m2")
    assert orch("init", "-y").code == 0  # the same text
    file.write_text("cluster: {partition: cpu}\n")
    said = orch("init", "-y")
    assert (said.code, "does not replace it" in said.err) == (2, True)
    assert file.read_text() == "cluster: {partition: cpu}\n"


def test_json_has_what_slurm_answered(orch: Type, clients: Path, tmp_path: Path) -> None:
    data = orch("init", "--print", "--json").data
    assert (data["written"], data["accounts"], data["qos"]) == (False, ["m1", "m2"], ["normal", "debug"])
    assert [item["partition"] for item in data["partitions"]] == ["cpu", "gpu", "debug"]
    assert not (tmp_path / "config").exists()


def test_an_answer_replaces_a_default(orch: Type, clients: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    answers = iter([str(tmp_path / "runs"), "cpu", "m1", "debug"])
    monkeypatch.setattr(module.sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(module.click, "prompt", lambda *_, **__: next(answers))
    monkeypatch.setattr(module.click, "confirm", lambda *_, **__: True)
    file = tmp_path / "config" / "orch" / "config.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("old: 1\n")
    monkeypatch.setenv("ORCH_USER_CONFIG", str(file))
    assert orch("init").code == 0
    assert (file.parent / "config.yaml.old").read_text() == "old: 1\n"
    cluster = compose("slurm-first-run").config.cluster
    found = (cluster.root, cluster.partition, cluster.account, cluster.qos)
    assert found == (str(tmp_path / "runs"), "cpu", "m1", "debug")


def test_nothing_is_written_without_answers(orch: Type, clients: Path, tmp_path: Path) -> None:
    said = orch("init")
    assert (said.code, "orch init -y" in said.err) == (2, True)
    assert not (tmp_path / "config").exists()


def test_without_slurm_the_reason_is_given(orch: Type, monkeypatch: Patch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    said = orch("init", "-y")
    assert (said.code, "there is no Slurm on this machine" in said.err) == (4, True)


NO_SOURCE = """\
sinfo: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host
sinfo: error: fetch_config: DNS SRV lookup failed
sinfo: error: _establish_config_source: failed to fetch config
sinfo: fatal: Could not establish a configuration source
"""
NO_SERVER = """\
sinfo: error: _fetch_child: failed to fetch remote configs: Unable to contact slurm controller (connect failure)
sinfo: error: _establish_config_source: failed to fetch config
sinfo: fatal: Could not establish a configuration source
"""


@pytest.mark.parametrize(
    ("stderr", "why", "hint"),
    [
        (NO_SOURCE, "it finds no slurm.conf on this host", "export SLURM_CONF=FILE"),
        (NO_SERVER, "slurmctld does not answer", "scontrol ping"),
    ],
    ids=["no-source", "no-server"],
)
def test_an_unreachable_slurm_is_one_clear_line(orch: Type, clients: Path, stderr: str, why: str, hint: str) -> None:
    """The messages are those of Slurm 22.05 without a configuration and with a server that is down."""
    (clients / "sinfo").write_text(f"#!/bin/sh\ncat >&2 <<'E'\n{stderr}E\nexit 1\n")
    said = orch("init", "-y")
    first, second = said.err.splitlines()
    assert (said.code, first) == (5, f"error: sinfo got no usable answer from Slurm: {why}")
    assert hint in second


def test_a_configuration_file_that_is_missing_is_named_at_once(
    orch: Type, clients: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Slurm's commands wait a minute for it."""
    (clients / "sinfo").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "gone.conf"))
    said = orch("init", "-y")
    assert (said.code, f"SLURM_CONF={tmp_path}/gone.conf: no such file" in said.err) == (5, True)


def test_accounting_that_does_not_answer_leaves_the_account_out(orch: Type, clients: Path) -> None:
    (clients / "sacctmgr").write_text("#!/bin/sh\necho down >&2; exit 1\n")
    data = orch("init", "--print", "--json").data
    assert (data["accounts"], set(data["settings"])) == ([], {"root", "partition"})


def test_the_folder_is_on_a_shared_file_system_if_one_is_known(tmp_path: Path, monkeypatch: Patch) -> None:
    environ = {"SCRATCH": str(tmp_path), "HOME": "/home/me"}
    mount = file_systems.Mount(point="/", kind="ext4", options=frozenset())
    monkeypatch.setattr(file_systems, "find_mount", lambda path: mount)
    assert guess_root(environ, "me") == Path("/home/me/orch-runs")
    mount = file_systems.Mount(point="/", kind="lustre", options=frozenset())
    assert guess_root(environ, "me") == tmp_path / "orch-runs"


def test_a_site_with_one_partition_is_not_asked_about(tmp_path: Path) -> None:
    found = SiteSurvey(partitions=read_partitions("only|up|infinite|n/a|2|8|4000|(null)\n"))
    questions = []

    def ask(question: str, default: str, known: object) -> str:
        questions.append(question)
        return default

    chosen = choose_settings(found, tmp_path, ask)
    assert chosen == {"root": str(tmp_path), "partition": "only"}
    assert len(questions) == 1
    assert json.dumps(settings_text(chosen, found)).count("cluster.cpus_per_task=8 cluster.mem=0") == 1
