"""Rendezvous of a generation's ranks, their device, and deterministic settings."""

import os
import secrets
import socket
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from trainer.contract.config import ClusterShape
from trainer.contract.failures.failure_patterns import Meaning, error_says
from trainer.contract.messages.ranks import TO_RANK, Store
from trainer.contract.ranks.rank_messages import RankSpec, place_variables, receive_message, send_message


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


_STORE_TIMEOUT = timedelta(minutes=5)
_COLLECTIVE_TIMEOUT = timedelta(hours=2)  # the last resort: above what a legal slow phase of a peer may take


KEY_BYTES = 32
_BACKLOG = 4096  # connections that may wait: all ranks come at once


class PeerLost(RuntimeError):
    """A peer or the agent went away before this rank could go on; the cause is elsewhere."""


def torchrun_environment(spec: RankSpec) -> dict[str, str]:
    """The variables that torchrun gives its workers, but for the address of the store."""
    return place_variables(
        rank=spec.rank,
        local_rank=spec.local_rank,
        world_size=spec.world_size,
        local_world_size=spec.local_world_size,
        node_rank=spec.node,
        generation=spec.generation,
        run_id=f"{spec.run or Path(spec.run_dir).name}-{spec.attempt}",
    )


def choose_interface(interface: str, host: str) -> None:
    """Tell gloo and NCCL which network to use, unless the user's environment already does."""
    chosen = interface or interface_of(host)
    if chosen:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", chosen)
        # "=": NCCL would take every interface whose name begins so.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={chosen}")


def interface_of(host: str) -> str:
    """The interface that bears the address `host`; empty when it is not one of this machine.

    Left to itself gloo takes the address of the host's own name, which many distributions make a loopback address.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            return name
    return "lo" if _loopback(host) else ""


def _loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def open_store(spec: RankSpec, control: socket.socket) -> tuple[TCPStore, bytes]:
    """The store and the generation's key: rank 0 makes both, and agents pass them on to the others.

    The key goes the way of the store's address, from agent to agent, and neither into the store nor the environment.
    """
    if spec.rank == 0:
        host, key = spec.host, secrets.token_bytes(KEY_BYTES)
        store = _host_store(host)
        port = store.port
        send_message(control, Store(host=host, port=port, key=key.hex()))
    else:
        host, port, key = _receive_store(control)
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_STORE_TIMEOUT)
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    return store, key


def _host_store(host: str) -> TCPStore:
    """A store that listens on this one address: left to itself torch listens on all interfaces."""
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server((host, 0), family=family, backlog=_BACKLOG) as listener:
        port: int = listener.getsockname()[1]
        # The store takes the descriptor over, and closes it.
        descriptor = os.dup(listener.fileno())
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT, master_listen_fd=descriptor
    )


def _receive_store(control: socket.socket) -> tuple[str, int, bytes]:
    found = receive_message(control, TO_RANK)
    if found is None:
        raise PeerLost("the agent went away before it sent the address of the store")
    return found.host, found.port, bytes.fromhex(found.key)


def join(spec: RankSpec, control: socket.socket, device: torch.device) -> bytes:
    """Make this process part of the world of its generation, whose key it returns; blocks until every rank is there."""
    # gloo then connects two ranks when one first sends to the other: a ring needs two sockets of a rank, all pairs W.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    store, key = open_store(spec, control)
    dist.init_process_group(
        backend(device),
        store=PrefixStore("world", store),
        rank=spec.rank,
        world_size=spec.world_size,
        timeout=_COLLECTIVE_TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )
    return key


def leave() -> None:
    """Take the world down; the work is done and saved, so a peer that left first is no failure."""
    try:
        dist.barrier()
        dist.destroy_process_group()
    except RuntimeError:
        return
