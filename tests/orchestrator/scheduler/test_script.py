"""Template fragments: placeholders, srun arguments and the interpreter."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.config.compose import compose
from orchestrator.config.layers import is_override
from orchestrator.errors import ConfigError
from orchestrator.scheduler.interface import JobSpec, Resources
from orchestrator.scheduler.script import load, parse, prepare

SHIPPED = Path(__file__).parents[3] / "sbatch_templates"
MODULE = "-P -u -m trainer.agent.main"


def spec(*templates: str, python: str = "", gpus: int = 0, **args: str) -> JobSpec:
    run_dir = Path("/shared/runs/x-1")
    return JobSpec(
        name="orch-x-1", comment="c", run_dir=run_dir, attempt=1, submission=run_dir / "s", python=python,
        resources=Resources(nodes=1, gpus_per_node=gpus), templates=templates, template_args=args,
    )  # fmt: skip


def test_the_default_runs_the_interpreter_that_runs_orch() -> None:
    made = prepare(spec("default"))
    assert made.agent == f"{shlex.quote(sys.executable)} {MODULE}"
    assert made.own_interpreter
    assert "umask 077" in made.setup


def test_a_configured_interpreter_is_quoted() -> None:
    made = prepare(spec("default", python="/opt/my env/bin/python"))
    assert made.agent == f"'/opt/my env/bin/python' {MODULE}"
    assert not made.own_interpreter


def test_modules_are_words_each_quoted() -> None:
    made = prepare(spec("modules", modules="cuda/12.8 nccl;reboot"))
    assert "module load cuda/12.8 'nccl;reboot' || exit 1" in made.setup


def test_a_saved_collection_of_modules_is_restored_first() -> None:
    made = prepare(spec("modules", collection="training", modules="nccl"))
    assert made.setup[-2:] == ("module restore training || exit 1", "module load nccl || exit 1")
    assert prepare(spec("modules", collection="training")).setup[-1] == "module restore training || exit 1"


@pytest.mark.parametrize(
    ("template", "args", "python"),
    [
        ("venv", {"venv": "/shared/my env"}, "'/shared/my env'/bin/python"),
        ("uv", {"project": "/shared/project"}, "/shared/project/.venv/bin/python"),
        ("pixi", {"project": "/shared/project"}, "/shared/project/.pixi/envs/default/bin/python"),
        ("micromamba", {"env": "train"}, "python3"),
    ],
)
def test_an_environments_own_python_runs_the_agents(template: str, args: dict[str, str], python: str) -> None:
    made = prepare(spec("default", template, **args))
    assert made.agent == f"{python} -P -u -m trainer.agent.main"
    assert not made.own_interpreter


def test_conda_uses_the_python_of_its_environment() -> None:
    made = prepare(spec("conda", env="train", base="/opt/conda"))
    assert made.setup[-2:] == (". /opt/conda/etc/profile.d/conda.sh || exit 1", "conda activate train || exit 1")
    assert made.agent == f"python3 {MODULE}"


def test_nccl_sets_only_what_is_given() -> None:
    assert prepare(spec("nccl")).setup == ("export NCCL_DEBUG=WARN",)
    made = prepare(spec("nccl", nccl_interface="ib0", nccl_hca="mlx5_0,mlx5_1"))
    assert made.setup[1:] == ("export NCCL_SOCKET_IFNAME=ib0", "export NCCL_IB_HCA=mlx5_0,mlx5_1")


def test_fragments_add_up_in_their_order() -> None:
    made = prepare(spec("default", "nccl", "pyxis", image="i"))
    assert made.setup[0] == "umask 077"
    assert made.setup[-1].startswith("export NCCL_DEBUG")
    assert made.srun


@pytest.mark.parametrize("name", sorted(path.stem for path in SHIPPED.glob("*.sh")))
def test_shipped_fragments_are_documented_shell(name: str) -> None:
    fragment = load(name)
    assert fragment.about
    assert all(argument.help for argument in fragment.args.values())
    required = {key: "/x" for key, argument in fragment.args.items() if argument.default is None}
    made = prepare(spec(name, **required))
    script = "\n".join([*made.setup, made.agent])
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_two_interpreters_are_refused() -> None:
    with pytest.raises(ConfigError, match="conda and apptainer both define"):
        prepare(spec("conda", "apptainer", env="e", base="b", image="i"))


@pytest.mark.parametrize(
    ("templates", "args", "words"),
    [
        (("pyxis",), {}, "pyxis needs cluster.template_args.image"),
        (("default",), {"image": "x"}, "cluster.template_args.image: not used"),
        (("nonesuch",), {}, "no template 'nonesuch'"),
        (("./nonesuch.sh",), {}, "cannot be read"),
        (("conda",), {"env": "a\nreboot", "base": "b"}, "newlines and control characters"),
        (("modules",), {"modules": "a --force"}, "must not begin with '-'"),
    ],
)
def test_invalid_templates_and_arguments_are_refused(
    templates: tuple[str, ...], args: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        prepare(spec(*templates, **args))


def test_typing_errors_get_the_nearest_name() -> None:
    with pytest.raises(ConfigError) as caught:
        prepare(spec("defualt"))
    assert caught.value.hint == "did you mean default?"
    with pytest.raises(ConfigError) as caught:
        prepare(spec("pyxis", imgae="x"))
    assert caught.value.hint == "did you mean image?"


def test_a_missing_argument_is_offered_as_it_is_typed() -> None:
    with pytest.raises(ConfigError) as caught:
        prepare(spec("venv"))
    assert is_override(caught.value.hint)
    added = caught.value.hint.replace("VALUE", "/env")
    assert compose("slurm-first-run", [added]).config.cluster.template_args == {"venv": "/env"}


def test_a_fragment_of_ones_own_is_given_by_its_path(tmp_path: Path) -> None:
    own = tmp_path / "own.sh"
    own.write_text(
        "#!/bin/bash\n#---\n# about: mine\n# args:\n#   level: {help: how much, default: '3'}\n#---\n"
        "export L={{ level }}\n"
    )
    assert prepare(spec(str(own), level="a b")).setup == ("export L='a b'",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("echo {{ typo }}", "unknown placeholder"),
        ("echo {{ typo", "not a template"),
        ("#---\n# : [\n#---\n", "not YAML"),
        ("#---\n# sruns: []\n#---\n", "unknown keys: sruns"),
        ("#---\n# args: {run_dir: {help: x}}\n#---\n", "argument run_dir"),
        ("#---\n# args: {x: {kind: number}}\n#---\n", "kind must be one of"),
        ("#---\n# orch: here\n#---\n", "orch must be one of installed, mounted"),
    ],
)
def test_a_broken_fragment_is_refused_with_the_place(tmp_path: Path, text: str, words: str) -> None:
    own = tmp_path / "own.sh"
    own.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        prepare(spec(str(own)))
    assert "own.sh" in str(caught.value)


def test_a_file_without_a_head_is_plain_shell() -> None:
    assert parse("x", "export A=1\n").body == "export A=1\n"
