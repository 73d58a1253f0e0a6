"""The device of a rank, its backend, and the settings that make two runs of the same step give the same bits."""

import os

import torch

from trainer.contract.config import ClusterShape
from trainer.contract.failures.failure_patterns import Meaning, error_says


class NodeFault(RuntimeError):
    """This node lacks what the job was promised; the same work may well succeed on another one."""


def is_node_fault(error: BaseException) -> bool:
    """Whether `error` is one of broken hardware rather than of the training code."""
    return isinstance(error, NodeFault) or (
        isinstance(error, RuntimeError) and error_says(str(error), Meaning.HARDWARE)
    )


def choose(cluster: ClusterShape, local_rank: int) -> torch.device:
    """The GPU with the rank's local number, or the CPU when the job asked for no GPUs.

    All ranks of a node see the same GPUs; fewer than were asked for would put several ranks on one.
    """
    wanted = cluster.gpus_per_node
    if not wanted:
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if visible < wanted:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = f" (CUDA_VISIBLE_DEVICES={shown})" if shown is not None else ""
        raise NodeFault(f"cluster.gpus_per_node={wanted}, but torch sees {visible} GPU(s) on this node{why}")
    device = torch.device("cuda", local_rank)
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
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a property
    torch.backends.cudnn.benchmark = False


def be_strict() -> None:
    """Raise where an operation has no deterministic kernel; attention's backward on GPUs takes its own only then."""
    torch.use_deterministic_algorithms(True, warn_only=False)


def threads_per_rank(cluster: ClusterShape) -> int:
    """From the configuration, not from the machine: another count sums in another order."""
    return max(1, cluster.cpus_per_task // cluster.ranks_per_node)
