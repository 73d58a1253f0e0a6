"""CPU cores of each rank: those of its GPU's NUMA node, or an equal share of the job's cores."""

import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_SYSFS = Path("/sys")
_DRIVER_SECONDS = 20.0
_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader")


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Places of this machine's cores, and of the GPUs that the ranks see."""

    numa_cores: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Logical CPUs of each NUMA node."""
    first_threads: Mapping[int, int] = field(default_factory=dict)
    """Lowest hardware thread of each logical CPU's core."""
    gpu_nodes: tuple[int | None, ...] = ()
    """NUMA node of each visible GPU, or None if unknown."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Ranks `first` to `first + count - 1` of `total` that share a machine; simulated nodes share one."""

    first: int
    count: int
    total: int


def bind_ranks(place: Place, allowed: Collection[int], topology: Topology) -> tuple[list[list[int]], str]:
    """PURE: return the cores of each local rank (empty: not bound), all among `allowed`, and the reason."""
    nodes = topology.gpu_nodes[: place.count]
    near = [sorted(set(allowed) & topology.numa_cores.get(-1 if node is None else node, frozenset())) for node in nodes]
    if len(near) == place.count and all(near):
        return near, "the cores of its GPU's NUMA node"
    unbound: list[list[int]] = [[]] * place.count
    if len(allowed) < place.total:
        return unbound, f"not bound: {len(allowed)} core(s) for {place.total} ranks"
    node_of = {core: node for node, cores in topology.numa_cores.items() for core in cores}
    # Both threads of a core go to the same rank.
    cores = sorted(allowed, key=lambda core: (node_of.get(core, 0), topology.first_threads.get(core, core), core))
    shares = [
        cores[rank * len(cores) // place.total : (rank + 1) * len(cores) // place.total] for rank in range(place.total)
    ]
    return [
        sorted(share) for share in shares[place.first : place.first + place.count]
    ], "an equal share of the job's cores"


def read_topology(visible: str | None, *, gpus: bool, sysfs: Path = _SYSFS) -> Topology:
    """Read this machine's topology. `visible` is CUDA_VISIBLE_DEVICES; unreadable parts are left out."""
    numa = {
        int(path.parent.name.removeprefix("node")): frozenset(parse_cores(_read(path)))
        for path in sysfs.glob("devices/system/node/node[0-9]*/cpulist")
    }
    threads: dict[int, int] = {}
    for path in sysfs.glob("devices/system/cpu/cpu[0-9]*/topology/thread_siblings_list"):
        siblings = parse_cores(_read(path))
        threads |= dict.fromkeys(siblings, min(siblings, default=0))
    buses = visible_gpus(_list_gpus(), visible) if gpus else []
    return Topology(
        numa_cores=numa, first_threads=threads, gpu_nodes=tuple(_numa_node(bus, sysfs) for bus in buses)
    )  # fmt: skip


def parse_cores(text: str) -> list[int]:
    """Return the numbers in a kernel list such as `0-3,8`."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return [core for low, _, high in ranges for core in range(int(low), int(high or low) + 1)]


def shorten_cores(cores: Sequence[int]) -> str:
    """Return sorted numbers as a kernel list, such as `0-3,8`."""
    starts = [core for core in cores if core - 1 not in cores]
    ends = [core for core in cores if core + 1 not in cores]
    return ",".join(f"{low}-{high}" if high > low else str(low) for low, high in zip(starts, ends, strict=True))


def visible_gpus(listing: str, visible: str | None) -> list[str]:
    """Return the PCI addresses of the GPUs in CUDA's order, from a listing of index, UUID and bus; "" if unknown."""
    rows = [[part.strip() for part in line.split(",")] for line in listing.splitlines() if line.count(",") == 2]
    if visible is None:
        return [bus for _, _, bus in rows]
    named = {name: bus for index, uuid, bus in rows for name in (index, uuid)}
    return [named.get(name.strip(), "") for name in visible.split(",") if name.strip()]


def _list_gpus() -> str:
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_DRIVER_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _numa_node(bus: str, sysfs: Path) -> int | None:
    """Return a GPU's NUMA node. The driver writes eight digits for the PCI domain, sysfs at least four."""
    domain, _, rest = bus.lower().partition(":")
    try:
        node = int(_read(sysfs / "bus/pci/devices" / f"{int(domain, 16):04x}:{rest}" / "numa_node"))
    except ValueError:
        return None
    return node if node >= 0 else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
