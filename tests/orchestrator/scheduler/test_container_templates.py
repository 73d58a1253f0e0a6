"""Container templates render only documented flags. Each row names the documentation of its flags."""

import shlex
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.errors import ConfigError
from orchestrator.scheduler.agent_folder import agent_folder
from orchestrator.scheduler.interface import JobSpec, Resources
from orchestrator.scheduler.job_environment import Submitter
from orchestrator.scheduler.script import mounts_orch, prepare

RUN = "/lustre/me/runs/x-1"
PYXIS = "github.com/NVIDIA/pyxis README.md, `srun --help`; args.c for NAME:FLAG and SRC:DST:FLAGS"
ENV_PYXIS = "github.com/NVIDIA/pyxis README.md, --container-env"
APPTAINER = "apptainer.org/docs/user: bind_paths_and_mounts, `src[:dest[:opts]]`"
IMAGE_BINDS = "apptainer.org/docs/user: bind_paths_and_mounts, Image Mounts, `<image-file>:<dest>:image-src=<source>`"
HOME = "pyxis args.c, add_mount and slurm_spank_user_init: a path begins with / or ."
CDI = "docs.nvidia.com container-toolkit, cdi-support: podman run --device nvidia.com/gpu=all; podman has no --gpu"
GPU = "apptainer.org/docs/user: gpu, --nv and --rocm"
OVERLAY = "apptainer.org/docs/user: persistent_overlays, --overlay and --writable-tmpfs"
VARIABLES = "apptainer.org/docs/user: environment_and_metadata, --env"
CSCS = "docs.cscs.ch/software/container-engine/run, `srun --environment`"
PODMAN = "docs.podman.io podman-run(1); github.com/NERSC/podman-hpc etc/modules.d/gpu.yaml (--gpu), nccl.yaml (--nccl)"
SHIFTER = "github.com/NERSC/shifter src/shifter.c, `shifter --help`; src/VolumeMap.c for the flag ro"
OCI = "slurm.schedmd.com/srun.html, --container=<path_to_container>"


def spec(template: str, gpus: int = 0, python: str = "", **args: str) -> JobSpec:
    return JobSpec(
        name="orch-x-1", comment="c", run_dir=Path(RUN), attempt=3, submission=Path(RUN) / "attempts/003/submission",
        resources=Resources(nodes=1, gpus_per_node=gpus), templates=("default", template), template_args=args,
        python=python,
    )  # fmt: skip


def agent() -> str:
    return str(agent_folder())


def mounts(separator: str = ",") -> str:
    return f"{RUN}:{RUN}{separator}{agent()}:{agent()}:ro"


def start(python: str = "python3") -> list[str]:
    return [python, "-u", agent(), "3"]


def bind() -> str:
    return f"--bind {RUN},{agent()}:{agent()}:ro"


ROWS: list[tuple[str, str, int, dict[str, str], str]] = [
    (PYXIS, "pyxis", 8, {"image": "nvcr.io#nvidia/pytorch:26.01-py3"},
     "--container-image=nvcr.io#nvidia/pytorch:26.01-py3 --container-mounts={mounts} --no-container-mount-home"),
    (PYXIS, "pyxis", 0, {"image": "/i/x.sqsh", "mounts": "/data:/data:ro+rprivate,/me:/code", "workdir": "/code"},
     "--container-image=/i/x.sqsh --container-mounts={mounts},/data:/data:ro+rprivate,/me:/code"
     " --container-workdir=/code --no-container-mount-home"),
    (PYXIS, "pyxis", 0,
     {"image": "i", "name": "torch:create", "save": "/i/y.sqsh", "mount_home": "true", "writable": "true"},
     "--container-image=i --container-mounts={mounts} --container-name=torch:create --container-save=/i/y.sqsh"
     " --container-mount-home --container-writable"),
    (PYXIS, "pyxis", 0,
     {"image": "i", "name": "torch:exec", "mount_home": "", "writable": "false", "remap_root": "true"},
     "--container-image=i --container-mounts={mounts} --container-name=torch:exec --container-remap-root"
     " --container-readonly"),
    (ENV_PYXIS, "pyxis", 0, {"image": "i", "name": "t", "env": "NCCL_DEBUG,PATH", "remap_root": "false",
                             "entrypoint": "false", "unshare": "ipc,uts"},
     "--container-image=i --container-mounts={mounts} --container-name=t --container-env=NCCL_DEBUG,PATH"
     " --no-container-mount-home --no-container-remap-root --no-container-entrypoint --container-unshare=ipc,uts"),
    (PYXIS, "pyxis", 0, {"image": "i", "entrypoint": "true"},
     "--container-image=i --container-mounts={mounts} --no-container-mount-home --container-entrypoint"),
    (HOME, "pyxis", 0, {"image": "~/x.sqsh", "mounts": "~/d:/d,~/e:/e:ro", "save": "~/y.sqsh"},
     "--container-image=/home/me/x.sqsh --container-mounts={mounts},/home/me/d:/d,/home/me/e:/e:ro"
     " --container-save=/home/me/y.sqsh --no-container-mount-home"),
    (APPTAINER, "apptainer", 0, {"image": "/i/a.sif", "binds": "/data:/mnt:ro,/opt"},
     "apptainer exec {bind} --bind /data:/mnt:ro,/opt /i/a.sif"),
    (GPU, "apptainer", 8, {"image": "/i/a.sif"}, "apptainer exec --nv {bind} /i/a.sif"),
    (GPU, "apptainer", 4, {"image": "/i/a.sif", "gpu": "rocm", "program": "singularity"},
     "singularity exec --rocm {bind} /i/a.sif"),
    (IMAGE_BINDS, "apptainer", 8, {"image": "/i/a.sif", "gpu": "none", "squashfs": "/d/c4.sqsh:/c4,/d/pile.sqsh:/pile"},
     "apptainer exec {bind} --bind /d/c4.sqsh:/c4:image-src=/ --bind /d/pile.sqsh:/pile:image-src=/ /i/a.sif"),
    (OVERLAY, "apptainer", 0, {"image": "/i/a.sif", "overlay": "/i/o.img:ro", "no_home": "true"},
     "apptainer exec {bind} --overlay /i/o.img:ro --no-home /i/a.sif"),
    (VARIABLES, "apptainer", 0, {"image": "/i/a.sif", "env": "A=1,B=two words", "writable_tmpfs": "true"},
     "apptainer exec {bind} --env 'A=1,B=two words' --writable-tmpfs /i/a.sif"),
    (CSCS, "edf", 4, {"environment": "pytorch"}, f"--environment={RUN}/attempts/003/submission/environment.toml"),
    (PODMAN, "podman-hpc", 4, {"image": "team/torch:1", "volumes": "/data:/data:ro", "modules": "nccl", "env": "A=1"},
     "podman-hpc run --rm --network=host --ipc=host --pid=host --env 'SLURM_*' --env 'SUBMITIT_*'"
     " --env 'ORCH_*' --env CUDA_VISIBLE_DEVICES --volume {run} --volume {agent} --volume /data:/data:ro --env A=1"
     " --gpu --nccl team/torch:1"),
    (CDI, "podman-hpc", 4, {"image": "i", "program": "/usr/bin/podman"},
     "/usr/bin/podman run --rm --network=host --ipc=host --pid=host --env 'SLURM_*' --env 'SUBMITIT_*'"
     " --env 'ORCH_*' --env CUDA_VISIBLE_DEVICES --volume {run} --volume {agent} --device nvidia.com/gpu=all i"),
    (SHIFTER, "shifter", 4,
     {"image": "docker:team/torch:1", "volumes": "/data:/data:ro", "modules": "gpu", "env": "A=1"},
     "shifter --image=docker:team/torch:1 --volume={run} --volume={agent} --volume=/data:/data:ro --module=gpu"
     " --env=A=1"),
    (OCI, "oci", 0, {"bundle": "/b/torch"}, "--container=/b/torch"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "template", "gpus", "args", "line"), ROWS)
def test_the_rendered_flags_are_the_documented_ones(
    source: str, template: str, gpus: int, args: dict[str, str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    made = prepare(spec(template, gpus, **args))
    run, mounted = mounts(" ").split()
    words = shlex.split(line.format(mounts=mounts(), bind=bind(), run=run, agent=mounted))
    assert [*made.srun, *shlex.split(made.agent)] == [*words, *start()], source


@pytest.mark.parametrize(
    ("templates", "mounted"), [(["default", "pyxis"], True), (["default", "conda"], False), ([], False)]
)
def test_a_restore_test_asks_whether_orch_is_mounted(templates: list[str], mounted: bool) -> None:
    assert mounts_orch(templates) is mounted


def test_a_chosen_python_is_the_images() -> None:
    made = prepare(spec("apptainer", image="/i/a.sif", python="/opt/conda/bin/python"))
    assert shlex.split(made.agent)[-4:] == start("/opt/conda/bin/python")


def test_an_edf_inherits_the_users_and_adds_the_mounts(tmp_path: Path) -> None:
    """docs.cscs.ch/software/container-engine/edf: base_environment, and `mounts` of later files are appended."""
    home = replace(spec("edf", environment="/e/a b.toml", mounts="${SCRATCH}:/s"), submission=tmp_path)
    made = prepare(home)
    subprocess.run(["bash", "-c", "\n".join(made.setup)], check=True)
    written = tomllib.loads((tmp_path / "environment.toml").read_text())
    assert written == {"base_environment": "/e/a b.toml", "mounts": [*mounts().split(","), "${SCRATCH}:/s"]}


def test_with_cleanenv_the_variables_of_the_job_enter_the_image(tmp_path: Path) -> None:
    """apptainer.org/docs/user, environment_and_metadata: APPTAINERENV_NAME is set in spite of --cleanenv."""
    fake = tmp_path / "apptainer"
    fake.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\nenv\n')
    fake.chmod(0o755)
    made = prepare(spec("apptainer", image="/i/a.sif", cleanenv="true", program=str(fake)))
    environ = {"PATH": "/usr/bin:/bin", "SLURM_NODEID": "1 a", "CUDA_VISIBLE_DEVICES": "", "SECRET": "x"}
    done = subprocess.run(["bash", "-c", f"exec {made.agent}"], env=environ, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[:2] == ["exec", "--bind"]
    assert "--cleanenv" in lines
    assert {"APPTAINERENV_SLURM_NODEID=1 a", "APPTAINERENV_CUDA_VISIBLE_DEVICES="} <= {*lines}
    assert "APPTAINERENV_SECRET=x" not in lines


@pytest.mark.parametrize(
    "name",
    [
        "EDF_PATH",  # docs.cscs.ch/software/container-engine/run, EDF search path
        "EDF_IMAGESTORE",  # the same page, Managing container images
        "SCRATCH",  # the same page and edf.md: ${SCRATCH} in an EDF; undefined variables are errors
        "SQUASH_DIR",  # github.com/NERSC/podman-hpc podman_hpc/siteconfig.py: folder of images, else $SCRATCH/storage
    ],
)
def test_a_runtimes_variables_reach_the_job(name: str) -> None:
    submitter = Submitter.from_environ({name: "/s", "OTHER": "x"})
    assert submitter.environ({name: "/of/the/controller"})[name] == "/s"


@pytest.mark.parametrize(
    ("template", "args"),
    [
        ("pyxis", {"image": "i", "name": "torch:keep"}),
        ("pyxis", {"image": "i", "name": "/tmp/torch"}),
        ("pyxis", {"image": "i", "name": "my torch"}),
        ("pyxis", {"image": "i", "unshare": "net"}),
        ("pyxis", {"image": "i", "writable": "yes"}),
        ("pyxis", {"image": "i", "save": "/folder/"}),
        ("apptainer", {"image": "i", "gpu": "cuda"}),
        ("apptainer", {"image": "i", "squashfs": "/d/c4.sqsh"}),
        ("edf", {"environment": 'a"b'}),
        ("edf", {"environment": "./here.toml"}),
        ("edf", {"environment": "pytorch.toml"}),
        ("podman-hpc", {"image": "i", "modules": "nccl mpi"}),
        ("oci", {"bundle": "relative"}),
    ],
)
def test_values_that_the_flag_does_not_take_are_refused(template: str, args: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=f"template {template} does not accept this"):
        prepare(spec(template, **args))


@pytest.mark.parametrize("place", ["/a b/x", "/a,b/x", "/a:b/x"])
def test_paths_that_a_runtime_would_split_are_refused(place: str) -> None:
    with pytest.raises(ConfigError, match="cannot be mounted"):
        prepare(replace(spec("pyxis", image="i"), run_dir=Path(place)))
