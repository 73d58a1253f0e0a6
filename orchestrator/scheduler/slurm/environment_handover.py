"""A command with another environment, for a caller that cannot give it one: through memory, never on a command line.

Command lines can be read by every user of the machine (`ps`), an environment by its owner alone.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

_CODE = """
import os, sys
with open(sys.argv[1], "rb") as memory:
    pairs = [pair.partition(b"=") for pair in memory.read().split(b"\\0") if pair]
os.execvpe(sys.argv[2], sys.argv[2:], {name: value for name, _, value in pairs})
"""


@contextmanager
def with_environment(environ: Mapping[str, str], command: Sequence[str]) -> Iterator[list[str]]:
    """Words that run `command` with this environment and no other variable, while inside. Raises OSError."""
    memory = os.memfd_create("orch-environment", os.MFD_CLOEXEC)
    try:
        pairs = (os.fsencode(name) + b"=" + os.fsencode(value) + b"\0" for name, value in environ.items())
        with os.fdopen(memory, "wb", closefd=False) as stream:
            stream.writelines(pairs)
        yield [sys.executable, "-ISc", _CODE, f"/proc/{os.getpid()}/fd/{memory}", *command]
    finally:
        os.close(memory)
