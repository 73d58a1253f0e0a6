"""Waits for ranks that share a sequence: no work of the rank that waits."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trainer.worker.reporting.phase_tracker import current_tracker


@contextmanager
def waiting(device: torch.device) -> Iterator[None]:
    """For a collective, or a wait for a message: a stream waits for it as it does for a kernel.

    On the CPU a thread that waits does not run, and is not measured.
    """
    tracker = current_tracker()
    if tracker is None or device.type == "cpu":
        yield
        return
    tracker.pause()
    try:
        yield
    finally:
        tracker.resume()
