"""Slurm's check of a job before the run exists: refusals, warnings and missing answers."""

from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.compose import compose
from orchestrator.errors import ConfigError, SubmitRejected
from orchestrator.scheduler.slurm import sbatch
from orchestrator.submission.create_run import check_script, check_with_scheduler
from tests.fakes.slurm_commands import SINFO, refusing, write_commands

NO_NODES = "allocation failure: Requested node configuration is not available"


class Site:
    """A user's view of submissions with fake Slurm commands."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.warned: list[str] = []

    def ask(self, program: str, *overrides: str, sinfo: str = SINFO, **others: str) -> None:
        path = write_commands(self.folder / "bin", program, sinfo=sinfo, **others)
        self.monkeypatch.setenv("PATH", path)
        words = [f"cluster.root={self.folder / 'runs'}", *overrides]
        config = compose("slurm-first-run", words, environ={"HOME": "/nowhere"}).config
        check_with_scheduler(config, "slurm", self.warned.append)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)


def test_slurm_sees_the_script_of_the_job_and_submits_nothing(site: Site, tmp_path: Path) -> None:
    site.ask(f'cat > {tmp_path / "script"}; echo "$@" > {tmp_path / "words"}', "cluster.partition=high")
    assert (tmp_path / "words").read_text() == "--test-only\n"
    assert "#SBATCH --partition=high" in (tmp_path / "script").read_text()
    assert not (tmp_path / "runs").exists()
    assert site.warned == []


REFUSED: list[tuple[str, tuple[str, ...], str, str]] = [
    (
        "sbatch: error: invalid partition specified: hihg\nallocation failure: Invalid partition name specified",
        ("cluster.partition=hihg",),
        "Slurm refused the job: invalid partition specified: hihg; Invalid partition name specified",
        "partitions here: low, high: type cluster.partition=high",
    ),
    (
        "allocation failure: Invalid partition name specified",
        ("cluster.partition=zzz",),
        "Slurm refused the job: Invalid partition name specified",
        "partitions here: low, high: type cluster.partition=low",  # the default one
    ),
    (
        NO_NODES,
        ("cluster.mem=8G",),
        "Slurm refused the job: Requested node configuration is not available",
        "cluster.mem=8G on 2 nodes: partition low has no node with that much: type cluster.mem=4000M",
    ),
    (
        "allocation failure: Invalid account or account/partition combination specified",
        ("cluster.account=nobody",),
        "Slurm refused the job: Invalid account or account/partition combination specified",
        "`sacctmgr show assoc user=$USER`: type cluster.account=NAME cluster.qos=NAME",
    ),
    (
        "allocation failure: Invalid node name specified",
        ("cluster.exclude=n[1,7]",),
        "Invalid node name specified; cluster.exclude names n7, which Slurm does not know",
        "type cluster.exclude=n1",
    ),
    (
        "allocation failure: Invalid node name specified",
        ("+cluster.sbatch.nodelist=n[1,8]",),
        "Invalid node name specified; cluster.sbatch.nodelist names n8, which Slurm does not know",
        "type cluster.sbatch.nodelist=n1",
    ),
    (
        "allocation failure: Invalid node name specified",
        ("+cluster.sbatch.nodelist=n8", "cluster.exclude=n1"),
        "Invalid node name specified; cluster.sbatch.nodelist names n8, which Slurm does not know",
        "type ~cluster.sbatch.nodelist",
    ),
    (
        "sbatch: unrecognized option '--bogus=1'\nTry \"sbatch --help\" for more information",
        ("+cluster.sbatch.bogus=1",),
        "Slurm refused the job: unrecognized option '--bogus=1'",
        "see `man sbatch` for its values: type ~cluster.sbatch.bogus",
    ),
    (
        "sbatch: error: Invalid --distribution specification",
        ("+cluster.sbatch.distribution=zz",),
        "Slurm refused the job: Invalid --distribution specification",
        "type ~cluster.sbatch.distribution",
    ),
]


@pytest.mark.parametrize(("said", "overrides", "what", "hint"), REFUSED)
def test_a_refusal_has_slurms_words_and_what_to_type(
    site: Site, said: str, overrides: tuple[str, ...], what: str, hint: str
) -> None:
    with pytest.raises(SubmitRejected) as caught:
        site.ask(refusing(said), *overrides)
    assert caught.value.what.endswith(what)
    assert caught.value.hint.endswith(hint)
    assert site.warned == []


@pytest.mark.parametrize(
    ("said", "words"),
    [
        # Nodes that are down are reason enough for these words, and sbatch would take the job.
        (NO_NODES, "Requested node configuration is not available; it is submitted anyway"),
        ("allocation failure: Required partition not available (inactive or drain)", "inactive or drain"),
        ("allocation failure: something that nobody knows", "something that nobody knows"),
    ],
)
def test_temporary_refusals_are_warnings(site: Site, said: str, words: str) -> None:
    site.ask(refusing(said), "cluster.mem=2G", "cluster.cpus_per_task=2")
    (warned,) = site.warned
    assert words in warned


@pytest.mark.parametrize(
    "program",
    [
        refusing("sbatch: error: Unable to contact slurm controller (connect failure)"),
        refusing("sbatch: fatal: Could not establish a configuration source"),
        refusing("", 139),
        "exec sleep 600",
    ],
)
def test_a_missing_answer_is_ignored(site: Site, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(sbatch, "TEST_TIMEOUT_S", 0.2 if "sleep" in program else sbatch.TEST_TIMEOUT_S)
    site.ask(program, "cluster.mem=2G")
    assert site.warned == []


@pytest.mark.parametrize(
    "said",
    [
        "cp: unrecognized option '--test-only'\nTry 'cp --help'.\nsbatch: error: Batch script is empty!",
        "usage: site-submit SCRIPT",
    ],
)
def test_a_wrapper_that_does_not_know_how_to_ask_refuses_nothing(site: Site, said: str) -> None:
    site.ask(refusing(said), "cluster.mem=2G")
    assert site.warned == []


def test_a_job_submitted_by_a_wrapper_is_cancelled(site: Site, tmp_path: Path) -> None:
    told = tmp_path / "cancelled"
    site.ask("echo Submitted batch job 4711", "cluster.mem=2G", scancel=f'echo "$@" > {told}')
    assert told.read_text() == "4711\n"
    assert site.warned == []


def test_silent_nodes_leave_a_refusal_for_lack_of_nodes_to_slurm(site: Site) -> None:
    site.ask(refusing(NO_NODES), "cluster.mem=900G", sinfo="exit 1")
    assert "it is submitted anyway" in site.warned[0]


def composed(*overrides: str) -> Any:
    return compose("tiny-gpt", overrides, environ={"HOME": "/nowhere"}).config


@pytest.mark.parametrize("kind", ["slurm", "local"])
def test_invalid_templates_are_refused_without_slurm(kind: str) -> None:
    with pytest.raises(ConfigError, match="no template 'modulez'") as caught:
        check_script(composed("cluster.templates=[modulez]"), kind)
    assert caught.value.hint == "did you mean modules?"
    with pytest.raises(ConfigError, match="not used by any of cluster.templates"):
        check_script(composed("+cluster.template_args.module=gcc"), kind)
    check_script(composed(), kind)


def test_more_gpus_than_this_machine_has_are_refused_here() -> None:
    with pytest.raises(SubmitRejected, match="more than this machine.s") as caught:
        check_script(composed("cluster.ranks_per_node=64", "cluster.gpus_per_node=64", "parallel.dp_shard=0",
                              "train.batch_size=256"), "local")  # fmt: skip
    assert caught.value.hint == "cluster.gpus_per_node=0 trains on CPUs"
