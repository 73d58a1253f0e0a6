"""Command lines of `orch shell` and `orch debug`: templates, containers and environment."""

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.scheduler.interactive import environment, local_words, step_words
from orchestrator.scheduler.interface import JobSpec, Resources
from orchestrator.scheduler.job_environment import Submitter
from orchestrator.scheduler.slurm.sbatch import allocation_words
from trainer.protocol.secrets.secret_redaction import LISTED


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobSpec:
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))
    return JobSpec(
        name="orch-x-1-00000000", comment="orch:x/1/00000000", run_dir=tmp_path / "x", attempt=1,
        submission=tmp_path / "x/attempts/001/submission", resources=Resources(nodes=2, cpus_per_task=8, partition="p"),
        submitter=Submitter(python="/venv/bin/python", package_root="", variables={"PATH": "/usr/bin", "HOME": "/h"}),
    )  # fmt: skip


PLACE = ["--jobid=7", "--nodelist=n2"]


def step(spec: JobSpec, *command: str) -> tuple[str, ...]:
    return step_words(spec, command, place=PLACE, folder="/work", terminal=False)


def test_the_templates_run_on_the_node_before_the_command(spec: JobSpec) -> None:
    modules = replace(spec, templates=("default", "modules"), template_args={"modules": "cuda nccl"})
    *srun, shell, option, script = step(modules, "nvidia-smi", "-L")
    assert srun == [
        "srun", *PLACE, "--overlap", "--nodes=1", "--ntasks=1", "--cpus-per-task=8", "--cpu-bind=none", "--mpi=none",
        "--chdir=/work",
    ]  # fmt: skip
    assert (shell, option) == ("bash", "-c")
    assert script.splitlines()[0] == "trap '' USR2"
    assert "module load cuda nccl || exit 1" in script.splitlines()
    assert script.splitlines()[-1] == "exec env nvidia-smi -L"
    assert "--pty" in step_words(spec, ["bash"], place=PLACE, folder="/", terminal=True)


def test_a_container_of_pyxis_is_entered_by_srun_and_never_saved(spec: JobSpec) -> None:
    args = {"image": "img:1", "name": "train:create", "save": "/images/new.sqsh"}
    shell, option, script = step(replace(spec, templates=("default", "pyxis"), template_args=args), "python", "a b.py")
    assert (shell, option) == ("bash", "-c")
    start = script.splitlines()[-1]
    assert start.startswith("exec srun --jobid=7 --nodelist=n2 --overlap ")
    assert " --container-image=img:1 " in start
    assert " --container-name=train " in start, "with :create, it would collide with the job's own container"
    assert "--container-save" not in start
    assert start.endswith(""" sh -c 'exec env python '"'"'a b.py'"'"''""")


def test_an_apptainer_image_is_entered_on_the_node(spec: JobSpec) -> None:
    inside = replace(spec, templates=("default", "apptainer"), template_args={"image": "/img.sif"})
    last = step(inside, "bash", "--norc")[-1].splitlines()[-1]
    assert last.startswith("exec apptainer exec ")
    assert last.endswith("/img.sif env bash --norc")
    assert local_words(inside, ["true"])[-1].endswith("/img.sif env true")


def test_the_environment_is_the_runs(spec: JobSpec) -> None:
    own = {"PATH": "/bin", "TERM": "xterm", "SLURM_JOB_ID": "1", "SLURM_CONF": "/s", "MINE": "x"}
    made = environment(spec, {"COLOUR": "blue"}, {"TOKEN": "t"}, own)
    assert made["PATH"] == "/venv/bin:/usr/bin"
    assert (made["COLOUR"], made["TOKEN"], made[LISTED], made["TERM"]) == ("blue", "t", "TOKEN", "xterm")
    assert made["SLURM_CONF"] == "/s"
    assert not {"MINE", "SLURM_JOB_ID"} & set(made)
    assert environment(replace(spec, python="python3.12"), {}, {}, own)["PATH"] == "/usr/bin"


def test_an_allocation_has_the_jobs_options_but_no_protocol(spec: JobSpec) -> None:
    resources = replace(spec.resources, time="30", qos="debug", sbatch={"reservation": "r", "exclusive": True})
    words = allocation_words(replace(spec, name="debug-x", resources=resources))
    assert words[0] == "salloc"
    assert {
        "--job-name=debug-x", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=8", "--time=30", "--partition=p",
        "--qos=debug", "--reservation=r", "--exclusive",
    } == set(words[1:])  # fmt: skip
