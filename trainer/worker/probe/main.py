"""Program of the probe's ranks: `python -m trainer.worker.probe.main FILE`, with torchrun's variables."""

import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from checkpointing.storage.durable import dump_line, read_json, write_durably
from trainer.protocol.plain_data import build
from trainer.protocol.probe import RESULT, CollectiveRate, ProbeOrder, ProbePlace, ProbeResult, StorageRate
from trainer.worker.probe.collectives import measure_collectives
from trainer.worker.probe.storage_rates import (
    largest_files,
    metadata_rate,
    read_rate,
    scratch_folder,
    stat_rate,
    write_rate,
)

_NETWORK = re.compile(r"NCCL INFO (?:Using network|NET/[^:]+ : Using) (.+)")


def main(words: list[str]) -> None:
    """Measure, and write the result as rank 0."""
    order = build(ProbeOrder, read_json(Path(words[0])))
    device = _device()
    log = Path(order.folder) / f"nccl-{os.environ['RANK']}.log"
    if device.type == "cuda":
        os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=str(log))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", device_id=device if device.index is not None else None
    )
    local, nodes = int(os.environ["LOCAL_WORLD_SIZE"]), dist.get_world_size() // int(os.environ["LOCAL_WORLD_SIZE"])
    collectives = tuple(_measure_network(order, local, nodes, device))
    storage = tuple(rate for place in order.places for rate in _measure_place(order, place, local, nodes))
    if dist.get_rank() == 0:
        result = ProbeResult(
            at=time.time(), nodes=nodes, ranks=dist.get_world_size(), backend=dist.get_backend(),
            transport=_nccl_transport(log) if device.type == "cuda" else _gloo_transport(),
            collectives=collectives, storage=storage,
        )  # fmt: skip
        write_durably(Path(order.folder) / RESULT, dump_line(asdict(result)).encode())
    dist.barrier()
    log.unlink(missing_ok=True)
    dist.destroy_process_group()


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def _measure_network(order: ProbeOrder, local: int, nodes: int, device: torch.device) -> Iterator[CollectiveRate]:
    """Yield the rates of the world, within nodes and between nodes, as far as there are several ranks in each."""
    world, rank = dist.get_world_size(), dist.get_rank()
    scopes = [("world", [list(range(world))])] if world > 1 else []
    if local > 1 and nodes > 1:
        scopes.append(("within nodes", [list(range(node * local, (node + 1) * local)) for node in range(nodes)]))
        scopes.append(("between nodes", [list(range(index, world, local)) for index in range(local)]))
    for scope, groups in scopes:
        mine = next(
            group
            for ranks, group in [(ranks, dist.new_group(ranks)) for ranks in groups]
            if rank in ranks
        )  # fmt: skip
        yield from measure_collectives(scope, mine, order.message_bytes, order.seconds, device)


def _measure_place(
    order: ProbeOrder, place: ProbePlace, local: int, nodes: int
) -> Iterator[StorageRate]:  # fmt: skip
    """Yield the rates of one place from the first node alone, then from all nodes at once. Collective."""
    for count in dict.fromkeys((1, nodes)):
        is_active = dist.get_rank() % local == 0 and (count > 1 or dist.get_rank() == 0)
        work = PlaceWork(order, place)
        for phase in (work.prepare, work.write, work.read, work.metadata):
            dist.barrier()  # so that all nodes do the same at the same time
            if is_active:
                work.attempt(phase)
        if is_active:
            work.attempt(work.clean_up)
            write_durably(_rate_file(order, count), dump_line(asdict(work.rate)).encode())
        dist.barrier()
        ranks = range(0, local * count, local)
        yield replace(_sum([_read_rate(_rate_file(order, count, rank)) for rank in ranks]), nodes=count)
        dist.barrier()
        if is_active:
            _rate_file(order, count).unlink()


def _rate_file(order: ProbeOrder, count: int, rank: int | None = None) -> Path:
    """Return the file in which a node's first rank passes its rate to the others."""
    return Path(order.folder) / f"rate-{count}-{dist.get_rank() if rank is None else rank}.json"


def _read_rate(path: Path) -> StorageRate:
    return build(StorageRate, read_json(path))


class PlaceWork:
    """Measurement of one place by one node. After an error, the remaining phases do nothing."""

    def __init__(self, order: ProbeOrder, place: ProbePlace) -> None:
        self._order, self._place, self._files = order, place, list[Path]()
        self._stack = ExitStack()
        self.rate = StorageRate(place=place.name, path=place.path, nodes=1, bytes=order.file_bytes)

    def attempt(self, phase: Callable[[], None]) -> None:
        """Run a phase, or record its error."""
        if self.rate.error and phase != self.clean_up:
            return
        try:
            phase()
        except OSError as error:
            self.rate = replace(self.rate, error=f"{error.filename or self._place.path}: {error.strerror or error}")

    def prepare(self) -> None:
        self._folder = Path(self._place.path)
        if self._place.read_only:
            self._files = largest_files(self._folder, self._order.file_bytes)
        else:
            self._folder = self._stack.enter_context(scratch_folder(self._folder))
            self._files = [self._folder / "data"]

    def write(self) -> None:
        if not self._place.read_only:
            self.rate = replace(self.rate, write_bytes_per_s=write_rate(self._folder, self._order.file_bytes))

    def read(self) -> None:
        if self._files:
            rate, nbytes = read_rate(self._files, self._order.file_bytes)
            self.rate = replace(self.rate, bytes=nbytes, read_bytes_per_s=rate)

    def metadata(self) -> None:
        measure = stat_rate if self._place.read_only else metadata_rate
        self.rate = replace(self.rate, metadata_per_s=measure(self._folder, self._order.files))

    def clean_up(self) -> None:
        self._stack.close()


def _sum(rates: list[StorageRate]) -> StorageRate:
    """Return the total rate of several nodes, or the first error."""
    failed = next((rate for rate in rates if rate.error), None)
    if failed is not None:
        return failed
    return replace(
        rates[0],
        write_bytes_per_s=_total([rate.write_bytes_per_s for rate in rates]),
        read_bytes_per_s=_total([rate.read_bytes_per_s for rate in rates]),
        metadata_per_s=_total([rate.metadata_per_s for rate in rates]),
    )


def _total(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _gloo_transport() -> str:
    """Return the interface and address by which this rank reaches the others, as gloo chooses them."""
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))
        address = probe.getsockname()[0]
    found = next(
        (
            name
            for name, known in psutil.net_if_addrs().items()
            if any(one.address == address for one in known)
        ),
        "",
    )  # fmt: skip
    return f"gloo, TCP on {named or found or address}"


def _nccl_transport(log: Path) -> str:
    """Return the network that NCCL reports in its own log."""
    try:
        named = _NETWORK.findall(log.read_text(errors="replace"))
    except OSError:
        named = []
    return f"nccl, {named[-1].strip()}" if named else "nccl, network unknown"


if __name__ == "__main__":
    main(sys.argv[1:])
