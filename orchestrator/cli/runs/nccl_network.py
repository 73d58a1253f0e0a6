"""The network that NCCL reports in a rank's log with NCCL_DEBUG=INFO."""

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from checkpointing.storage.durable import open_regular
from trainer.protocol.logs.log_rotation import log_files

_READ_BYTES = 4 << 20
_MARK = "NCCL "
_USING = re.compile(r"NCCL INFO Using network (.+?)\s*$")
_DEVICES = re.compile(r"NCCL INFO NET/(\w+) ?: Using (\[\d+\][^;]*)")
_DEVICE = re.compile(r"\[\d+\](\S+)")
_PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is ([\w-]+)(?:, fabric is ([\w-]+))?(?:.*\(found (\d+) nics\))?")
_CHANNEL = re.compile(r"via NET/[^/]+/\d+(/GDRDMA)?")
_VERSION = re.compile(r"NCCL version (\S+)")
_PLAIN = {"Socket": "TCP sockets", "IB": "InfiniBand"}


@dataclass(frozen=True, kw_only=True)
class NcclNetwork:
    """The network of the newest communicator in a log; `gpudirect` is None if no message between nodes was listed."""

    network: str = ""
    devices: tuple[str, ...] = ()
    gpudirect: bool | None = None
    version: str = ""

    def __str__(self) -> str:
        link = "RoCE" if any(device.endswith("/RoCE") for device in self.devices) else ""
        name = f"{link or _PLAIN.get(self.network, self.network)}"
        over = ", ".join(device.partition(":")[0] for device in self.devices)
        direct = {None: "", True: ", with GPUDirect RDMA", False: ", without GPUDirect RDMA"}[self.gpudirect]
        shown = "" if self.network == "Socket" else direct
        version = f" (NCCL {self.version})" if self.version else ""
        return f"{name}{f' over {over}' if over else ''}{shown}{version}"


def find_network(lines: Iterable[str]) -> NcclNetwork | None:
    """Return the last network in these log lines, or None without one."""
    found, devices = NcclNetwork(), dict[str, tuple[str, ...]]()
    for line in lines:
        if _MARK not in line and "NET/" not in line:
            continue
        if match := _VERSION.search(line):
            found = replace(found, version=match[1])
        elif match := _DEVICES.search(line):
            devices[match[1]] = tuple(_DEVICE.findall(match[2]))
            if not found.network:  # NCCL before 2.7 does not name the network
                found = replace(found, devices=devices[match[1]])
        elif match := _PROVIDER.search(line):
            count = f" x{match[3]}" if match[3] else ""
            devices["OFI"] = (f"{match[2] or match[1]}{count}",)
        elif match := _USING.search(line):
            found = replace(found, network=match[1], devices=_find_devices(match[1], devices), gpudirect=None)
        elif match := _CHANNEL.search(line):
            # Some pairs of a GPU and an adapter may be too far apart: one such pair slows the whole ring.
            found = replace(found, gpudirect=match[1] is not None and found.gpudirect is not False)
    if not found.network and devices:
        found = replace(found, network=next(reversed(devices)))
    return found if found.network else None


def _find_devices(network: str, devices: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the devices of a network. Plugins use names of their own: Libfabric's prints OFI, Mellanox's prints IB."""
    if network in devices:
        return devices[network]
    return devices.get("OFI" if "libfabric" in network.lower() else "IB", ())


def read_network(log: Path) -> NcclNetwork | None:
    """Return the network in the first megabytes of a rank's log, or None if it is absent or unreadable."""
    with suppress(OSError):
        for file in log_files(log)[:1]:
            with open_regular(file) as stream:
                return find_network(stream.read(_READ_BYTES).decode(errors="replace").splitlines())
    return None
