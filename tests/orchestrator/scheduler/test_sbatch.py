"""Job scripts: their contents; no value can become a command."""

import os
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.cli.main import orch
from orchestrator.errors import ConfigError
from orchestrator.scheduler.interface import JobSpec, Resources
from orchestrator.scheduler.script import load
from orchestrator.scheduler.slurm.sbatch_values import KNOWN, OWNED, check_nodes, check_options, minutes
from orchestrator.scheduler.slurm.slurm_scheduler import render


def spec(folder: Path = Path("/shared/runs/x-1"), **resources: Any) -> JobSpec:
    return JobSpec(
        name="orch-x-1-1-0011aabb", comment="orch:x-1/1", run_dir=folder, attempt=1, submission=folder / "submission",
        resources=Resources(**{"nodes": 2, **resources}),
    )  # fmt: skip


def options(text: str) -> dict[str, str | bool]:
    """Return the options of a script, parsed like a shell."""
    found: dict[str, str | bool] = {}
    for line in text.splitlines():
        if line.startswith("#SBATCH "):
            (word,) = shlex.split(line.removeprefix("#SBATCH "))
            name, _, value = word.removeprefix("--").partition("=")
            found[name] = value if "=" in word else True
    return found


def test_the_script_holds_the_job_and_gives_every_node_one_task() -> None:
    found = options(
        render(spec(cpus_per_task=8, gpus_per_node=4, partition="gpu", mem="64G", time="2-00:00:00", account="phys"))
    )
    assert found["hold"] is True
    assert found["no-requeue"] is True
    wanted = {
        "job-name": "orch-x-1-1-0011aabb", "comment": "orch:x-1/1", "nodes": "2", "ntasks-per-node": "1",
        "cpus-per-task": "8", "gpus-per-node": "4", "partition": "gpu", "mem": "64G", "time": "2880", "account": "phys",
        "signal": "USR2@120", "open-mode": "append", "chdir": "/shared/runs/x-1", "export": "ALL",
        "output": "/shared/runs/x-1/submission/%j_0_log.out",
    }  # fmt: skip
    assert {key: found[key] for key in wanted} == wanted
    assert not set(found) & {"wckey", "qos", "constraint", "exclude", "gpus-per-task", "requeue"}


@pytest.mark.parametrize(
    ("given", "gres"),
    [({}, "gpu:4"), ({"gres": "gpu:h100:4"}, "gpu:h100:4"), ({"gres": "nvme:1"}, "nvme:1,gpu:4")],
)
def test_a_site_without_gpus_per_node_gets_gres(given: dict[str, str], gres: str) -> None:
    found = options(render(spec(gpus_per_node=4, gpus="gres", sbatch=given)))
    assert found["gres"] == gres
    assert "gpus-per-node" not in found


def test_srun_gets_the_cores_and_lets_agents_outlive_each_other() -> None:
    (line,) = (line for line in render(spec(cpus_per_task=8)).splitlines() if line.startswith("srun "))
    words = shlex.split(line)
    assert {"--cpus-per-task=8", "--kill-on-bad-exit=0", "--wait=0", "--open-mode=append"} <= set(words)
    start = ["-u", "-m", "trainer.agent.main", "/shared/runs/x-1", "/shared/runs/x-1/submission"]
    assert words[words.index("-P") + 1 :] == start


def test_with_spare_nodes_a_dead_one_ends_neither_job_nor_step() -> None:
    script = render(spec(nodes=3, spares=1, sbatch={"no-kill": "off"}))
    assert options(script)["no-kill"] is True
    (line,) = (line for line in script.splitlines() if line.startswith("srun "))
    assert {"--no-kill", "--kill-on-bad-exit=0", "--wait=0"} <= set(shlex.split(line))
    assert "--no-kill" not in render(spec())


def test_excluded_nodes_are_folded_into_one_host_list() -> None:
    assert options(render(spec(exclude=("gpu[001-003]", "gpu004", "login"))))["exclude"] == "gpu[001-004],login"
    assert check_nodes("k", ("n1", "n1")) == "n1"


@pytest.mark.parametrize("hostile", ["gpu[1-", "gpu[1-3", "@group", "*", "gpu 1", "gpu;rm"])
def test_a_broken_host_list_is_refused(hostile: str) -> None:
    with pytest.raises(ConfigError, match="cluster.exclude"):
        render(spec(exclude=(hostile,)))


HOSTILE = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        ["x\ntouch canary", "x\rtouch canary", "$(touch canary)", "`touch canary`", "x'; touch canary; '", "-x",
         "--wrap=x", 'x"; touch canary; "', "x\\", "x #", "#", "x\x00y", "x\u2028touch canary", "x\x85touch canary",
         "\x0btouch canary", "${IFS}", "a b", "!!", "x&touch canary", "x|touch canary", ">canary", "~", "é",
         "x\x1b[31m"]
    ),
)  # fmt: skip
FIELDS = ("partition", "account", "qos", "constraint", "mem")


@settings(max_examples=150)
@given(
    field=st.sampled_from((*FIELDS, "sbatch", "exclude", "time", "comment", "name", "run_dir", "python")), value=HOSTILE
)
def test_a_hostile_value_is_refused_or_arrives_unchanged_and_never_runs(
    tmp_path_factory: pytest.TempPathFactory, field: str, value: str
) -> None:
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "srun").write_text("#!/bin/sh\n")
    (folder / "srun").chmod(0o700)
    asked = _with(field, value)
    try:
        text = render(asked)
    except ConfigError:
        return
    script = folder / "script.sh"
    script.write_text(text)
    ran = subprocess.run(
        ["bash", str(script)], cwd=folder, env={"PATH": f"{folder}:{os.defpath}"}, capture_output=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert sorted(item.name for item in folder.iterdir()) == ["script.sh", "srun"], "something ran"
    _assert_unchanged(field, value, options(text), text)


def _with(field: str, value: str) -> JobSpec:
    if field == "sbatch":
        return spec(sbatch={"reservation": value})
    if field == "exclude":
        return spec(exclude=(value,))
    if field in ("comment", "name", "python"):
        return replace(spec(), **{field: value})
    if field == "run_dir":
        return spec(Path("/shared") / value)
    return spec(**{field: value})


def _assert_unchanged(field: str, value: str, found: dict[str, str | bool], text: str) -> None:
    if field in FIELDS and value:
        assert found[field] == value
    if field == "sbatch":
        assert found["reservation"] == value
    if field == "run_dir":
        assert found["chdir"] == str(Path("/shared") / value)
    if field == "name":
        assert found["job-name"] == value
    if field == "python" and value:
        (line,) = (line for line in text.splitlines() if line.startswith("srun "))
        assert os.path.expanduser(value) in shlex.split(line)


@pytest.mark.parametrize("option", sorted(OWNED))
def test_options_that_orch_owns_are_refused_with_the_reason(option: str) -> None:
    with pytest.raises(ConfigError, match="cannot be set here") as caught:
        check_options({option: "x"})
    assert f"cluster.sbatch.{option}" in str(caught.value)


@pytest.mark.parametrize("option", ["req", "part", "job_name", "ntasks_per_node", "out", "wra", "no-requ", "hol"])
def test_their_abbreviations_and_underscores_are_refused_too(option: str) -> None:
    with pytest.raises(ConfigError, match="cannot be set here"):
        check_options({option: "x"})


def test_hints_of_these_refusals_work() -> None:
    for why in OWNED.values():
        for verb, option in re.findall(r"orch (\w+)[^`]*? (--[\w-]+)", why):
            context = click.Context(orch)
            command = orch.get_command(context, verb)
            assert command is not None
            assert any(option in parameter.opts for parameter in command.params), why


@pytest.mark.parametrize(
    "option", ["", "-N", "N", "--nodes", "nice=5\n", "nice 5", "NICE", "a;b", "x\ny", "-", "gres=1"]
)
def test_invalid_option_names_are_refused(option: str) -> None:
    with pytest.raises(ConfigError):
        check_options({option: "x"})


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("container-image", "[default,pyxis] +cluster.template_args.image=VALUE"),
        ("container_mounts", "[default,pyxis] +cluster.template_args.mounts=VALUE"),
        ("no-container-mount-home", "[default,pyxis] +cluster.template_args.mount_home=false"),
        ("container-remap-root", "[default,pyxis] +cluster.template_args.remap_root=true"),
        ("container-readonly", "[default,pyxis] +cluster.template_args.writable=false"),
        ("environment", "[default,edf] +cluster.template_args.environment=NAME"),
        ("container", "[default,oci] +cluster.template_args.bundle=PATH"),
    ],
)
def test_containers_are_chosen_by_a_template(option: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_options({option: "x"})
    assert caught.value.hint == f"cluster.templates={hint}"
    template, argument = re.findall(r"default,(\w+)|template_args\.(\w+)", hint)
    assert argument[1] in load(template[0]).args


def test_known_options_pass_with_their_types() -> None:
    given = {
        "exclusive": True,
        "nice": 5,
        "mail_type": "END,FAIL",
        "gres": "gpu:h100:4",
        "contiguous": False,
        "bb": None,
    }
    assert check_options(given) == {"exclusive": True, "nice": "5", "mail-type": "END,FAIL", "gres": "gpu:h100:4"}
    assert not KNOWN & set(OWNED)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("5", 5), ("0:30", 1), ("90:01", 91), ("1:00:00", 60), ("2-0", 2880), ("1-2:30", 1590), ("1-00:00:01", 1441)],
)
def test_time_limits_are_read_as_slurm_reads_them(text: str, expected: int) -> None:
    assert minutes("cluster.time", text) == expected
