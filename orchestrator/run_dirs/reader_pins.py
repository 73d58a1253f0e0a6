"""Pins held by processes that are reading a checkpoint. Each pin lasts as long as its process."""

import os
import time
from contextlib import suppress
from secrets import token_hex

from checkpointing.retention.garbage import Pin, pin, read_all_pins, remove_pin
from checkpointing.storage.backends import Storage
from orchestrator.registry.lease import Holder, host_name, this_process
from trainer.protocol.node_identity import boot_time


def pin_for_reading(storage: Storage, name: str) -> str:
    """Pin a checkpoint for this process; return the holder to pass to `remove_pin`. Raises OSError."""
    remove_dead_readers(storage)
    holder = token_hex(4)  # a process may have two readers of one checkpoint
    note = f"being read by orch, process {os.getpid()} on {host_name()}"
    pin(storage, name, note, time.time(), holder=holder, process=str(this_process()))
    return holder


def remove_dead_readers(storage: Storage) -> None:
    """Remove pins whose process on this host has died; pins that cannot be removed stay."""
    try:
        pins = read_all_pins(storage)
    except OSError:
        return
    for (name, holder), held in pins.items():
        if _is_dead(held):
            with suppress(OSError):
                remove_pin(storage, name, holder)


def _is_dead(held: Pin) -> bool:
    """Return whether the pin's process has certainly died; False on another host or in another pid namespace."""
    reader = Holder.parse(held.process)
    if reader is None:
        return False
    if reader.lives is not None:
        return not reader.lives
    return reader.host == host_name() and held.pinned_at < boot_time()
