"""Rendezvous of a generation's ranks, their device, and deterministic settings."""

import os
import secrets
import socket
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from trainer.protocol.config_sections.recipe_config import ClusterShape
from trainer.protocol.failures.failure_patterns import Meaning, has_meaning
from trainer.protocol.messages.ranks import (
    TO_RANK,
    RankSpec,
    RendezvousStore,
    receive_message,
    send_message,
)


class NodeFault(RuntimeError):
    """This node lacks resources promised to the job. The same work may succeed on another node."""


def is_node_fault(error: BaseException) -> bool:
    """Return whether `error` comes from broken hardware, not from the training code."""
    return isinstance(error, NodeFault) or (
        isinstance(error, RuntimeError) and has_meaning(str(error), Meaning.HARDWARE)
    )


def choose(cluster: ClusterShape, local_rank: int) -> torch.device:
    """Return the GPU with the rank's local number, or the CPU if no GPUs were requested. Raises NodeFault."""
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
    """Return the backend. Host memory always uses gloo, so that checkpoints can coordinate without a GPU."""
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"


def be_deterministic(threads: int) -> None:
    """Fix settings that could change bits between two runs: thread count, kernel choice, cuBLAS workspace.

    Operations without a deterministic kernel only warn, unless `be_strict` is called.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Filling every new tensor costs time, and nothing here reads uninitialized memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a property
    torch.backends.cudnn.benchmark = False


def be_strict() -> None:
    """Make operations without a deterministic kernel raise.

    On GPUs, the backward pass of attention is only deterministic in this mode.
    """
    torch.use_deterministic_algorithms(True, warn_only=False)


def threads_per_rank(cluster: ClusterShape) -> int:
    """Return the number of threads per rank. It is configured, because it affects the order of sums."""
    return max(1, cluster.cpus_per_task // cluster.ranks_per_node)


_STORE_TIMEOUT = timedelta(minutes=5)
_COLLECTIVE_TIMEOUT = timedelta(hours=2)  # last resort: longer than any legitimate slow phase of a peer


KEY_BYTES = 32
_BACKLOG = 4096  # pending connections, because all ranks connect at the same time


class PeerLost(RuntimeError):
    """A peer or the agent disconnected before this rank could continue. The cause is elsewhere."""


def choose_interface(interface: str, host: str) -> None:
    """Select the network for gloo and NCCL, unless the user's environment already does."""
    chosen = interface or find_interface(host)
    if chosen:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", chosen)
        # Without "=", NCCL would use every interface with this prefix.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={chosen}")


def find_interface(host: str) -> str:
    """Return the interface with the address `host`; empty if this machine has none.

    By default, gloo uses the address of the host's own name, which many distributions map to a loopback address.
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
    """Return the store and the generation's secret key, which agents pass from rank 0 to the other ranks."""
    if spec.rank == 0:
        host, key = spec.host, secrets.token_bytes(KEY_BYTES)
        store = _host_store(host)
        port = store.port
        send_message(control, RendezvousStore(host=host, port=port, key=key.hex()))
    else:
        host, port, key = _receive_store(control)
        store = _make_store(host, port, is_master=False)
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    return store, key


def _host_store(host: str) -> TCPStore:
    """Return a store that listens only on this address. By default, torch listens on all interfaces."""
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server((host, 0), family=family, backlog=_BACKLOG) as listener:
        port: int = listener.getsockname()[1]
        # The store takes over the descriptor, and closes it.
        descriptor = os.dup(listener.fileno())
    return _make_store(host, port, is_master=True, master_listen_fd=descriptor)


def _make_store(host: str, port: int, **options: Any) -> TCPStore:
    """Return a store of torch's default kind or, in a torch without libuv such as Debian's, of the older one."""
    options |= {"wait_for_workers": False, "timeout": _STORE_TIMEOUT}
    try:
        return TCPStore(host, port, **options)
    except dist.DistStoreError as error:
        if "built without libuv" not in str(error):
            raise
        return TCPStore(host, port, **options, use_libuv=False)


def _receive_store(control: socket.socket) -> tuple[str, int, bytes]:
    found = receive_message(control, TO_RANK)
    if found is None:
        raise PeerLost("the agent disconnected before it sent the store's address")
    return found.host, found.port, bytes.fromhex(found.key)


def join(spec: RankSpec, control: socket.socket, device: torch.device) -> tuple[PrefixStore, bytes]:
    """Join the world of this generation; return its store and its key. Blocks until every rank has joined."""
    # gloo then connects two ranks at their first message. A ring needs two sockets per rank, instead of one per peer.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    store, key = open_store(spec, control)
    world = PrefixStore("world", store)
    dist.init_process_group(
        backend(device),
        store=world,
        rank=spec.rank,
        world_size=spec.world_size,
        timeout=_COLLECTIVE_TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )
    return world, key


def leave(store: PrefixStore, spec: RankSpec) -> None:
    """Leave the world once every rank has finished. Rank 0 hosts the store, so it leaves last.

    The work is finished and saved, so a lost peer is no failure. A barrier would connect ranks that have not yet
    exchanged a message; while the first ones leave, such a connection can fail, or wait for ever.
    """
    try:
        _meet(store, "finished", spec.world_size, wait=True)
        dist.destroy_process_group()
        _meet(store, "left", spec.world_size, wait=spec.rank == 0)
    except RuntimeError:
        return


def _meet(store: PrefixStore, name: str, ranks: int, *, wait: bool) -> None:
    """Count this rank in, and wait until all ranks have been counted if `wait`."""
    if store.add(name, 1) == ranks:
        store.set(f"all {name}", "")
    if wait:
        store.wait([f"all {name}"], _COLLECTIVE_TIMEOUT)
