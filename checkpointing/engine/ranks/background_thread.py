"""Threads beside the training thread, which use one core each."""

import threading
from collections.abc import Callable

import torch


def start_background_thread(act: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread whose torch operations do not spread over the cores that training computes on."""
    mine, settled = torch.get_num_threads(), threading.Event()

    def run() -> None:
        torch.set_num_threads(1)
        settled.set()
        act()

    # A daemon: a rank that must die does not wait for peers that are already gone.
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    settled.wait()
    # The number is a thread's own, but threads to come begin with the one that was set last.
    torch.set_num_threads(mine)
    return thread
