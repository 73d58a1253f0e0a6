"""Order and result of the job that measures a cluster's network and storage (`orch doctor --nodes`)."""

from dataclasses import dataclass, field

RESULT = "result.json"  # written by rank 0 in the order's folder


@dataclass(frozen=True, kw_only=True)
class ProbePlace:
    """Folder whose rates are measured. Nothing is written to a read-only place, such as the training data."""

    name: str  # run root, data.path, tier /scratch
    path: str
    read_only: bool = False


@dataclass(frozen=True, kw_only=True)
class ProbeOrder:
    """Work of the job. `folder` is shared by all nodes and receives the result."""

    folder: str
    places: tuple[ProbePlace, ...] = ()
    message_bytes: tuple[int, ...] = ()
    file_bytes: int = 256 << 20
    files: int = 200
    """Small files that are created, renamed, read and removed for the metadata rate."""
    seconds: float = 0.5
    """Time for one collective at one message size, and for one repetition of a storage rate."""


@dataclass(frozen=True, kw_only=True)
class CollectiveRate:
    """Time of one operation at one message size; the median of its repetitions on the slowest rank."""

    scope: str  # world, within nodes, between nodes
    operation: str
    ranks: int
    bytes: int
    seconds: float
    bus_bytes_per_s: float
    """Bandwidth of the links, as nccl-tests computes it: it does not depend on the number of ranks."""


@dataclass(frozen=True, kw_only=True)
class StorageRate:
    """Rates of one place, used by one node or by all nodes at once. None: not measured."""

    place: str
    path: str
    nodes: int
    bytes: int
    """Bytes that each node read or wrote."""
    write_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None
    metadata_per_s: float | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """Everything that one probe measured."""

    at: float
    nodes: int
    ranks: int
    backend: str
    transport: str
    collectives: tuple[CollectiveRate, ...] = field(default=())
    storage: tuple[StorageRate, ...] = field(default=())
