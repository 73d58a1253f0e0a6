"""Values that tell where a secret has got to: in files, in command lines, in what commands print."""

import base64
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHELL, FILE, HOOK = "canary-shell-12345", "canary/file+67890", "canary-hook-13579"
PIECES = tuple(text.encode() for text in (SHELL, FILE, HOOK, "canary%2Ffile%2B67890", "shell-12345"))
IN_BASE64 = tuple(
    base64.b64encode(before + value.encode())[4:-4] for value in (SHELL, FILE) for before in (b"", b"a", b"user:")
)


def told_in(data: bytes) -> list[bytes]:
    return [piece for piece in (*PIECES, *IN_BASE64) if piece in data]


def files_that_tell(folder: Path) -> dict[str, list[bytes]]:
    """Every file below the folder with a secret in it; one may be gone before it is read."""
    found = {}
    for path in folder.rglob("*"):
        try:
            data = path.read_bytes() if path.is_file() else b""
        except FileNotFoundError:
            continue
        if told := told_in(data):
            found[str(path.relative_to(folder))] = told
    return found


@contextmanager
def command_lines_watched() -> Iterator[set[bytes]]:
    """Every command line of this machine that tells a secret, looked at again and again meanwhile."""
    found: set[bytes] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.02):
            for process in filter(str.isdigit, os.listdir("/proc")):
                try:
                    line = Path(f"/proc/{process}/cmdline").read_bytes()
                except OSError:
                    continue
                if told_in(line):
                    found.add(line)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
