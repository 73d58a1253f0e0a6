"""The device of a rank, its backend, and the settings that make two runs of the same step give the same bits."""

import os

import torch

from trainer.contract.config import ClusterShape


def choose(cluster: ClusterShape, local_rank: int) -> torch.device:
    """The GPU with the rank's local number, or the CPU when the job asked for no GPUs."""
    if not cluster.gpus_per_node:
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if not visible:
        raise RuntimeError(f"cluster.gpus_per_node={cluster.gpus_per_node}, but torch sees no GPU on this node")
    # An agent that binds GPUs by CUDA_VISIBLE_DEVICES leaves one visible device, which then is number 0.
    device = torch.device("cuda", local_rank if visible > local_rank else 0)
    torch.cuda.set_device(device)
    return device


def backend(device: torch.device) -> str:
    """Collectives of host memory always go through gloo, so that checkpoints can coordinate without a GPU."""
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"


def be_deterministic(threads: int) -> None:
    """Fix what could change bits between two runs: thread count, kernel choice, scratch memory of cuBLAS.

    Operations that have no deterministic kernel only warn, until `be_strict`.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Filling every fresh tensor costs a write of it; nothing here reads uninitialized memory.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False


def be_strict() -> None:
    """Raise where an operation has no deterministic kernel; attention's backward on GPUs takes its own only then."""
    torch.use_deterministic_algorithms(True, warn_only=False)


def threads_per_rank(cluster: ClusterShape) -> int:
    """From the configuration, not from the machine: another count sums in another order."""
    return max(1, cluster.cpus_per_task // cluster.ranks_per_node)
