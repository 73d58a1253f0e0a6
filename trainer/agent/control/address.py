"""The address of this node that the other nodes of the job can reach."""

import fcntl
import os
import socket
import struct
from collections.abc import Mapping

from trainer.contract.config_sections.scheduler_kinds import traits

_SIOCGIFADDR = 0x8915


def reachable(kind: str, interface: str, environ: Mapping[str, str] = os.environ) -> str:
    """IPv4 address for rendezvous; raises RuntimeError when the named interface has none."""
    if interface:
        return of_interface(interface)
    if traits(kind).simulated_nodes:
        return "127.0.0.1"
    launcher = environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    candidates = [_of_name(socket.gethostname()), _towards(launcher) if launcher else ""]
    # Debian gives a host's own name a loopback address: useful only when every node is on this host.
    outward = [address for address in candidates if address and not address.startswith("127.")]
    return next(iter([*outward, *filter(None, candidates)]), "127.0.0.1")


def of_interface(interface: str) -> str:
    """The IPv4 address of a network interface."""
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise RuntimeError(
                f"cluster.interface={interface}: {error.strerror} on this node, which has {names}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def _of_name(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ""


def _towards(address: str) -> str:
    """The address with which this node would speak to `address`; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return ""
        host: str = probe.getsockname()[0]
        return host
