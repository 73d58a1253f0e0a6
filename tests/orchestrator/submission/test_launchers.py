"""Launchers in a `command:` are refused if orch starts more than one rank."""

from pathlib import Path

import pytest

from orchestrator.config.run_config import ClusterConfig, RunConfig
from orchestrator.errors import ConfigError
from orchestrator.submission import user_code


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return tmp_path


def check(command: tuple[str, ...], nodes: int = 2, ranks: int = 1) -> None:
    cluster = ClusterConfig(kind="local", nodes=nodes, ranks_per_node=ranks)
    user_code.check(RunConfig(command=command, cluster=cluster))


DOUBLED = [
    "torchrun --nproc_per_node=2 train.py --x 1", "/opt/bin/torchrun --standalone train.py",
    "torchrun --nproc-per-node gpu -m pkg.train --y", "torchrun --no-python ./train.sh", "torchrun --nnodes=1 train.py",
    "torchrun --nnodes 1 train.py", "python -m torch.distributed.run --nproc_per_node 4 train.py",
    "python3.11 -u -m torch.distributed.launch train.py",
    "accelerate launch --multi_gpu --mixed_precision bf16 train.py", "python -m accelerate.commands.launch train.py",
    "deepspeed --num_gpus 8 train.py --deepspeed ds.json", "srun -n 4 --overlap python train.py",
    "mpirun -np 2 -x PATH python train.py", "env -u A OMP_NUM_THREADS=1 torchrun train.py",
    "nice -n 5 uv run torchrun train.py", "srun", "lightning run model --devices 2 train.py",
    "python -m lightning.fabric.cli run train.py", "conda run -n a tune run --nproc_per_node 2 recipe",
    "torchrun train.py --num_nodes 2", "torchrun train.py --nnodes=2", "torchrun -m pkg.train --nnodes 2",
    "torchrun --standalone train --nnodes 2", "torchrun --no-python ./train --nnodes 2",
    "python -m torch.distributed.run train.py --num_nodes 2", "accelerate launch train.py --num_machines 2",
    "python -m accelerate.commands.accelerate_cli launch train.py --num_nodes 2",
    "accelerate launch python train.py", "fabric run python train.py",
]  # fmt: skip


@pytest.mark.parametrize("command", DOUBLED)
def test_a_launcher_on_each_of_several_ranks_is_refused(command: str) -> None:
    with pytest.raises(ConfigError, match="would train a separate model") as refused:
        check(tuple(command.split()))
    assert "cluster.ranks_per_node" in refused.value.hint
    assert "orch starts 2 ranks (2 x 1)" in refused.value.what


@pytest.mark.parametrize(
    "command",
    ["python train.py", "python train.py torchrun", "python -c torchrun", "python train.py -m torch.distributed.run",
     "accelerate test", "torchrun --nnodes=2 --rdzv_endpoint=a:1 train.py", "bash -c ls",
     "torchrun --rdzv_id 7 --nnodes 2 -m pkg.train",
     "python -m torch.distributed.run --nnodes 2 train.py --num_nodes 1", "nohup torchrun --nnodes=2 train.py",
     "python -m accelerate.commands.accelerate_cli launch --multi_gpu --num_machines 2 train.py",
     "accelerate launch --num_machines=2 train.py", "tune run --nnodes 2 recipe"],
)  # fmt: skip
def test_other_programs_and_one_world_over_all_nodes_pass(command: str) -> None:
    check(tuple(command.split()))


def test_one_rank_may_start_the_others_itself() -> None:
    check(("torchrun", "--nproc_per_node=4", "train.py"), nodes=1)
    with pytest.raises(ConfigError, match="2 ranks"):
        check(("torchrun", "--nnodes=2", "train.py"), nodes=1, ranks=2)


BEHIND = [
    "prlimit --core=0 torchrun --standalone --nproc_per_node=2 train.py",
    "conda run -n env torchrun train.py",
    "conda run --no-capture-output -n deepspeed torchrun train.py",
    "mamba run -p /envs/a torchrun -m pkg.train",
    "micromamba run -n env accelerate launch train.py",
    "poetry run deepspeed --num_gpus 8 train.py",
    "nsys profile -t cuda,nvtx -o out torchrun --nproc_per_node 2 train.py",
    "apptainer exec --nv img.sif torchrun train.py",
    "singularity exec img.sif python -m torch.distributed.run train.py",
    "xvfb-run -a torchrun train.py",
    "flock /tmp/lock mpirun -np 2 ./solver",
    "numactl --cpunodebind=0 torchrun train.py",
    "timeout 30m nice torchrun train.py",
    "tune run --nproc_per_node 2 full_finetune_distributed --config a",
    "conda run -n env tune run --nproc_per_node 2 full_finetune_distributed --config a",
    "lightning run model --devices 2 train.py",
    "python -m composer.cli.launcher -n 2 train.py",
    "python -m horovod.runner.launch -np 2 python train.py",
    "python -m lightning.fabric.cli run train.py",
    "nohup torchrun train.py --nnodes=2",
    "env A=1 torchrun train.py --num_nodes 2",
    "conda run -n env torchrun train.py --num_nodes 2",
    "apptainer exec --nv img.sif torchrun train.py --num_nodes 2",
    "xvfb-run -a mpirun -np 2 ./solver",
    "uv run accelerate launch python train.py",
]


@pytest.mark.parametrize("command", BEHIND)
def test_a_launcher_behind_any_other_program_is_refused(command: str) -> None:
    with pytest.raises(ConfigError, match="would train a separate model"):
        check(tuple(command.split()))
    check(tuple(command.split()), nodes=1)


@pytest.mark.parametrize(
    "command",
    [
        "flock /tmp/torchrun python train.py",
        "conda run -n deepspeed python train.py",
        "conda run -n torchrun python -m pkg.train",
        "uv run --with deepspeed python train.py",
        "nsys profile -o torchrun python train.py",
        "axolotl train --launcher torchrun config.yml",
        "my-trainer --backend deepspeed --config ds.json",
        "my-trainer deepspeed config.yaml",
        "prlimit --core=0 python train.py torchrun train.py",
        "tune run full_finetune_distributed --config a",
        "tune run full_finetune_distributed --nproc_per_node 2",
        "./prog --launcher srun --steps 5",
        "./prog --launcher srun llama",
        "./prog --launcher torchrun train.sh",
        "my-trainer deepspeed config.yaml --script train.py",
        "prlimit --core=0 bash -c ls",
    ],
)
def test_the_mere_name_of_a_launcher_passes(command: str) -> None:
    check(tuple(command.split()))


SHELL = [
    ("grep torchrun train.py", False),
    ("conda run -n env torchrun train.py", True),
    ("cd x && torchrun --nproc_per_node=2 train.py", True),
    ("A=1 torchrun \\\n  train.py", True),
    ("for i in 1 2; do srun python train.py; done", True),
    ("if true; then\n  exec accelerate launch train.py\nfi", True),
    ("torchrun --nnodes=2 --node_rank=$RANK train.py", False),
    ('if [ "$SLURM_NODEID" = 0 ]; then torchrun train.py; fi', False),
    ("# torchrun train.py\npython train.py", False),
    ("echo torchrun train.py", False),
    ("echo 'not closed\npython train.py", False),
]


@pytest.mark.parametrize(("text", "refused"), SHELL)
def test_the_text_of_a_shell_is_read_too(text: str, refused: bool, here: Path) -> None:
    (here / "go.sh").write_text(f"#!/bin/bash\n{text}\n")
    (here / "go.sh").chmod(0o755)
    behind = (("prlimit", "--core=0", "bash", "-c", text), ("xvfb-run", "-a", "bash", "go.sh"))
    for command in (("bash", "-c", text), ("bash", "go.sh"), ("./go.sh", "1"), *behind):
        if refused:
            with pytest.raises(ConfigError, match="would train a separate model"):
                check(command)
        else:
            check(command)


@pytest.mark.parametrize(
    ("command", "meant"),
    [
        (("python train.py",), "'command=[python, train.py]'"),
        (("python train.py --x 1", "--y"), "'command=[python, train.py, --x, \"1\", --y]'"),
        (("python train.py && echo done",), "'command=[bash, -c, \"python train.py && echo done\"]'"),
    ],
)
def test_a_program_and_its_arguments_in_one_text_are_refused(command: tuple[str, ...], meant: str, here: Path) -> None:
    with pytest.raises(ConfigError, match="no program `python train.py") as refused:
        check(command)
    assert refused.value.hint == meant
    (here / "my program").write_text("#!/bin/sh\n")
    (here / "my program").chmod(0o755)
    check(("./my program",))
