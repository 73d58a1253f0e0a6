"""A program that prints a lot, aborts, prints more in the next generation, waits for a kill, and ends in a new attempt.

`printing_program.py FOLDER SEEN MIB`: prints MIB in each life. It waits regularly until SEEN, the output of
`orch logs -f`, has the newest line: the test is about missed lines, not about speed.
"""

import os
import sys
import time
from pathlib import Path

LINES = 16384
"""Lines of 64 bytes between two waits: 1 MiB; the log keeps 3."""


def line(life: int, number: int) -> str:
    return f"life {life} line {number:08d} ".ljust(63, ".")


def wait_until_seen(seen: Path, text: str) -> None:
    while text.encode() not in end_of(seen):
        time.sleep(0.02)


def end_of(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        return file.read()


def main() -> None:
    folder, seen, mib = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    life = len(list(folder.glob("life-*"))) + 1
    (folder / f"life-{life}").touch()
    count = mib * (1 << 20) // 64
    for first in range(0, count, LINES):
        sys.stdout.writelines(line(life, number) + "\n" for number in range(first, first + LINES))
        sys.stdout.flush()
        wait_until_seen(seen, line(life, first + LINES - 1))
    if life == 1:
        os.abort()
    if life == 2:
        (folder / "waits").touch()
        time.sleep(3600)


if __name__ == "__main__":
    main()
