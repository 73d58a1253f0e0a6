"""Imported by any Python that has this folder in PYTHONPATH: kills the process at its n-th file operation."""

import os
import signal
import sys

VARIABLE = "DIE_AT_OPERATION"
"""The number of the operation, a colon, and the file that is made right before the death."""

NAMES = ("mkdir", "open", "write", "pwrite", "fsync", "ftruncate", "rename", "replace", "unlink", "rmdir")


def arm(number: int, note: str) -> None:
    """Die of SIGKILL at the `number`-th operation from now on: odd numbers before it happens, even ones after.

    The file `note` then names the operation.
    """
    left, true_open, true_write = [number], os.open, os.write

    def die(operation: str) -> None:
        true_write(true_open(note, os.O_WRONLY | os.O_CREAT, 0o600), operation.encode())
        os.kill(os.getpid(), signal.SIGKILL)

    def guarded(name: str) -> None:
        true = getattr(os, name)

        def operation(*arguments: object, **options: object) -> object:
            left[0] -= 1
            last = left[0] == 0
            if last and number % 2:
                die(f"before {name}")
            result = true(*arguments, **options)
            if last:
                die(f"after {name}")
            return result

        setattr(os, name, operation)

    for name in NAMES:
        guarded(name)


# Only the writer: the process that starts it has the variable too, and must live.
if os.environ.get(VARIABLE) and "checkpointing.writer.process" in sys.orig_argv:
    _number, _, _note = os.environ[VARIABLE].partition(":")
    arm(int(_number), _note)
