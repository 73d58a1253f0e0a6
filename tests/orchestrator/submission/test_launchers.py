"""Launchers in a `command:`: one is started on each node, and those that would train several models are refused."""

from pathlib import Path

import pytest

from orchestrator.config.run_config import ClusterConfig, RunConfig
from orchestrator.errors import ConfigError
from orchestrator.submission import user_code
from trainer.protocol.launchers import NodePlace, place_launcher, starts_once_per_node


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return tmp_path


def check(command: tuple[str, ...], nodes: int = 2, ranks: int = 1, launcher: str = "auto") -> None:
    cluster = ClusterConfig(kind="local", nodes=nodes, ranks_per_node=ranks)
    user_code.check(RunConfig(command=command, cluster=cluster, launcher=launcher))


TASKS_OF_THE_JOB = ["srun -n 4 --overlap python train.py", "srun", "ibrun python train.py"]


@pytest.mark.parametrize("command", TASKS_OF_THE_JOB)
def test_a_launcher_of_the_jobs_tasks_is_refused(command: str) -> None:
    with pytest.raises(ConfigError, match="would train a separate model") as refused:
        check(tuple(command.split()))
    assert "cluster.ranks_per_node" in refused.value.hint
    assert "orch starts 2 ranks (2 x 1)" in refused.value.what


STARTED_ON_EACH_NODE = [
    "torchrun train.py", "torchrun --nproc-per-node gpu -m pkg.train --y", "torchrun --no-python ./train.sh",
    "torchrun --nnodes 2 --nproc_per_node=2 train.py --nproc_per_node=7",
    "python -m torch.distributed.run --nproc_per_node 2 train.py --nnodes 9",
    "python3.11 -u -m torch.distributed.launch train.py",
    "accelerate launch --multi_gpu --mixed_precision bf16 train.py", "python -m accelerate.commands.launch train.py",
    "accelerate launch --num_processes 4 --num_machines=2 train.py", "deepspeed train.py --deepspeed ds.json",
    "deepspeed --num_gpus 2 train.py", "env -u A OMP_NUM_THREADS=1 torchrun train.py",
    "nice -n 5 uv run torchrun train.py",
    "lightning run model --devices 2 train.py", "python -m lightning.fabric.cli run train.py",
    "conda run -n a tune run --nproc_per_node 2 recipe", "tune run --nnodes 2 recipe",
    "torchrun --rdzv_id 7 --nnodes 2 -m pkg.train", "accelerate launch python train.py", "fabric run python train.py",
    "conda run --no-capture-output -n deepspeed torchrun train.py", "mamba run -p /envs/a torchrun -m pkg.train",
    "micromamba run -n env accelerate launch train.py", "poetry run deepspeed --num_gpus 2 train.py",
    "nsys profile -t cuda,nvtx -o out torchrun --nproc_per_node 2 train.py", "xvfb-run -a torchrun train.py",
    "apptainer exec --nv img.sif torchrun train.py", "numactl --cpunodebind=0 torchrun train.py",
    "singularity exec img.sif python -m torch.distributed.run train.py", "timeout 30m nice torchrun train.py",
    "python -m composer.cli.launcher -n 2 train.py", "nohup torchrun train.py --nnodes=7",
]  # fmt: skip


@pytest.mark.parametrize("command", STARTED_ON_EACH_NODE)
def test_a_launcher_is_started_once_on_each_node(command: str, here: Path) -> None:
    words = tuple(command.split())
    check(words, ranks=2)
    assert starts_once_per_node("auto", words, here)
    assert not starts_once_per_node("orch", words, here)
    with pytest.raises(ConfigError, match="would train a separate model") as refused:
        check(words, ranks=2, launcher="orch")
    assert refused.value.hint == "type launcher=auto"


DISAGREE = [
    ("torchrun --nproc_per_node=4 train.py", "torchrun --nproc_per_node=4 disagrees with cluster.ranks_per_node=2",
     "type cluster.ranks_per_node=4, or remove"),
    ("torchrun --nnodes 1 train.py", "torchrun --nnodes 1 disagrees with cluster.nodes=2", "type cluster.nodes=1, or"),
    ("accelerate launch --num_processes 2 train.py", "disagrees with cluster.nodes x cluster.ranks_per_node=4",
     "type cluster.ranks_per_node=1, or remove"),
    ("accelerate launch --num_processes 3 train.py", "disagrees with cluster.nodes x", "remove the option: orch"),
    ("deepspeed --num_gpus 8 train.py", "deepspeed --num_gpus 8 disagrees", "type cluster.ranks_per_node=8"),
    ("python -m torch.distributed.run --nproc-per-node 1 train.py", "disagrees", "type cluster.ranks_per_node=1"),
    ("torchrun --standalone train.py", "--standalone is for one node", "remove --standalone"),
    ("mpirun -np 4 -x PATH python train.py", "without regard to orch's nodes", "orch starts the ranks"),
    ("xvfb-run -a mpirun -np 4 ./solver", "would train a separate model", "orch starts the ranks"),
    ("python -m horovod.runner.launch -np 4 python train.py", "would train a separate model", "orch starts the ranks"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "what", "hint"), DISAGREE)
def test_options_that_contradict_the_cluster_are_refused(command: str, what: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(tuple(command.split()), ranks=2)
    assert what in refused.value.what
    assert hint in refused.value.hint


@pytest.mark.parametrize("command", ["mpirun -np 2 ./solver.sh", "torchrun --standalone --nproc_per_node=2 train.py"])
def test_on_one_node_a_launcher_may_start_all_ranks(command: str, here: Path) -> None:
    check(tuple(command.split()), nodes=1, ranks=2)
    assert starts_once_per_node("auto", tuple(command.split()), here)


@pytest.mark.parametrize(
    "command",
    [
        "python train.py", "python train.py torchrun", "python -c torchrun", "python train.py -m torch.distributed.run",
        "accelerate test", "bash -c ls",
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
)  # fmt: skip
def test_the_mere_name_of_a_launcher_passes(command: str, here: Path) -> None:
    check(tuple(command.split()))
    assert not starts_once_per_node("auto", tuple(command.split()), here)


SHELL = [
    ("grep torchrun train.py", "orch"),
    ("conda run -n env torchrun train.py", "node"),
    ("cd x && torchrun --nproc_per_node=1 train.py", "node"),
    ("A=1 torchrun \\\n  train.py", "node"),
    ("for i in 1 2; do srun python train.py; done", "refused"),
    ("if true; then\n  exec accelerate launch --num_machines $NNODES train.py\nfi", "node"),
    ("accelerate launch train.py", "refused"),
    ("torchrun --nnodes=2 --node_rank=$NODE_RANK train.py", "node"),
    ("torchrun --nnodes=2 --node_rank=$SLURM_NODEID train.py", "node"),
    ("torchrun --standalone train.py", "refused"),
    ('if [ "$LOCAL_RANK" = 0 ]; then torchrun train.py; fi', "orch"),
    ("# torchrun train.py\npython train.py", "orch"),
    ("echo torchrun train.py", "orch"),
    ("echo 'not closed\npython train.py", "orch"),
]


@pytest.mark.parametrize(("text", "expected"), SHELL)
def test_the_text_of_a_shell_is_read_too(text: str, expected: str, here: Path) -> None:
    (here / "go.sh").write_text(f"#!/bin/bash\n{text}\n")
    (here / "go.sh").chmod(0o755)
    behind = (("prlimit", "--core=0", "bash", "-c", text), ("xvfb-run", "-a", "bash", "go.sh"))
    for command in (("bash", "-c", text), ("bash", "go.sh"), ("./go.sh", "1"), *behind):
        if expected == "refused":
            with pytest.raises(ConfigError, match="would train a separate model"):
                check(command)
        else:
            check(command)
            assert starts_once_per_node("auto", command, here) == (expected == "node")


SPAWNS = """
import torch.multiprocessing as mp
def main(rank, world):
    dist.init_process_group("gloo", init_method="tcp://{host}:29500", rank=rank, world_size=world)
mp.spawn(main, args=(2,), nprocs=2)
"""


def test_a_script_that_spawns_its_ranks_is_started_once_on_each_node(here: Path) -> None:
    command = ("python", "train.py")
    (here / "train.py").write_text(SPAWNS.format(host="localhost"))
    assert starts_once_per_node("auto", command, here)
    check(command, nodes=1, ranks=2)
    with pytest.raises(ConfigError, match="through localhost"):
        check(command)
    (here / "train.py").write_text(SPAWNS.format(host="node0"))
    check(command)
    (here / "train.py").write_text('if "LOCAL_RANK" not in os.environ:\n' + SPAWNS)
    assert not starts_once_per_node("auto", command, here)


PLACE = NodePlace(nodes=2, ranks=4, node=1, host="n0", port=777, hostfile="/h")
WORDS = [
    ("torchrun train.py --lr 1", "--nnodes=2 --nproc-per-node=4 --node-rank=1 --rdzv-backend=static --rdzv-endpoint= "
     "--master-addr=n0 --master-port=777 --max-restarts=0"),
    ("accelerate launch --multi_gpu train.py", "--num_machines=2 --num_processes=8 --machine_rank=1 "
     "--rdzv_backend=static --main_process_ip=n0 --main_process_port=777 --max_restarts=0 "
     "--deepspeed_multinode_launcher=standard"),
    ("deepspeed train.py", "--num_nodes=2 --num_gpus=4 --hostfile=/h --no_ssh --node_rank=1 --master_addr=n0 "
     "--master_port=777"),
    ("python -m lightning.fabric.cli run train.py", "--num-nodes=2 --devices=4 --node-rank=1 --main-address=n0 "
     "--main-port=777"),
    ("composer -n 4 train.py", "--nproc=4 --world_size=8 --base_rank=4 --node_rank=1 --master_addr=n0 "
     "--master_port=777"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "options"), WORDS)
def test_the_options_of_a_place_come_before_the_script(command: str, options: str) -> None:
    before, _, after = command.partition("train.py")
    assert " ".join(place_launcher(command.split(), PLACE, {})) == f"{before}{options} train.py{after}"


def test_the_script_of_a_launcher_must_exist() -> None:
    with pytest.raises(ConfigError, match="no file") as refused:
        check(("torchrun", "--nproc-per-node=2", "trane.py", "--lr", "1"), ranks=2)
    assert "did you mean" in refused.value.hint
    check(("torchrun", "-m", "pkg.trane"), ranks=2)


def test_on_one_node_deepspeed_keeps_the_devices_of_the_job() -> None:
    alone = NodePlace(nodes=1, ranks=4, node=0, host="n0", port=777)
    assert "--num_gpus=4" in place_launcher(["deepspeed", "train.py"], alone, {})
    assert place_launcher(["deepspeed", "train.py"], alone, {"CUDA_VISIBLE_DEVICES": "2,3"}) == (
        "deepspeed", "--master_port=777", "train.py",
    )  # fmt: skip


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
