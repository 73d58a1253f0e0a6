"""Choice of the network interface."""

import os
import socket
from types import SimpleNamespace

import psutil
import pytest

from trainer.worker.startup import rendezvous


@pytest.fixture(autouse=True)
def two_networks(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    found = {"lo": "127.0.0.1", "eth0": "10.1.2.3", "eth01": "10.1.2.33"}
    addresses = {
        name: [SimpleNamespace(family=socket.AF_PACKET, address="aa:bb"), SimpleNamespace(address=address)]
        for name, address in found.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)


def chosen() -> tuple[str | None, str | None]:
    return os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("NCCL_SOCKET_IFNAME")


@pytest.mark.parametrize(
    ("interface", "host", "expected"),
    [
        ("", "10.1.2.3", ("eth0", "=eth0")),
        ("", "127.0.0.1", ("lo", "=lo")),
        ("", "127.0.1.1", ("lo", "=lo")),
        ("", "192.168.7.7", (None, None)),
        ("ib0", "10.1.2.3", ("ib0", "=ib0")),
    ],
)
def test_collectives_use_the_network_of_the_rendezvous(interface, host, expected):
    rendezvous.choose_interface(interface, host)
    assert chosen() == expected


def test_a_users_own_choice_stays(monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib")
    rendezvous.choose_interface("", "10.1.2.3")
    assert chosen() == ("eth0", "ib")
