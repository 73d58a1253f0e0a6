"""Problems of container templates that the login node can see."""

from pathlib import Path

import pytest

from orchestrator.scheduler.container_check import container_problems

PYXIS_HELP = "      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH\n"


@pytest.mark.parametrize(
    ("template", "args", "srun_help", "problems"),
    [
        ("pyxis", {"image": "nvcr.io#nvidia/pytorch:26.01-py3"}, PYXIS_HELP, []),
        ("pyxis", {"image": "i"}, "Usage: srun\n", ["`srun --help` does not list --container-image"]),
        ("pyxis", {"image": "i"}, "", []),  # no Slurm here: reported elsewhere
        ("edf", {"environment": "pytorch"}, "--environment=NAME", []),
        ("edf", {"environment": "/gone.toml"}, "srun", ["does not list --environment", "/gone.toml does not exist"]),
        ("apptainer", {"image": "/gone.sif", "program": "sh"}, "", ["template_args.image: /gone.sif does not exist"]),
        ("apptainer", {"image": "docker://x", "program": "no-such"}, "", ["there is no no-such on this machine"]),
        ("default", {"image": "/gone"}, "", []),
        ("nonesuch", {}, "", []),
    ],
)
def test_problems(template: str, args: dict[str, str], srun_help: str, problems: list[str]) -> None:
    found = list(container_problems(["default", template], args, lambda: srun_help))
    assert len(found) == len(problems)
    for (problem, hint), words in zip(found, problems, strict=True):
        assert words in problem
        assert hint


@pytest.mark.parametrize(
    ("template", "args", "hint"),
    [
        (
            "apptainer",
            {"image": "docker://x", "program": "no-such"},
            "install it, or cluster.template_args.program=PATH",
        ),
        ("apptainer", {"image": "/gone.sif", "program": "sh"}, "cluster.template_args.image=PATH"),
        ("pyxis", {"image": "i"}, "use apptainer, podman-hpc, shifter"),
    ],
)
def test_hints_without_slurm_name_no_compute_nodes(template: str, args: dict[str, str], hint: str) -> None:
    assert [hint for _, hint in container_problems([template], args, lambda: "srun", here=True)] == [hint]


def test_an_image_that_exists_is_no_problem(tmp_path: Path) -> None:
    image = tmp_path / "a.sif"
    image.touch()
    assert list(container_problems(["apptainer"], {"image": str(image), "program": "sh"}, str)) == []
