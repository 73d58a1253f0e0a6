"""Whether a folder takes a file of some size now: no system call tells of quotas."""

import secrets
from contextlib import suppress
from pathlib import Path

from checkpointing.storage.disk_errors import explain_disk_error

SMALL = 4096
_BLOCK = 1 << 20


def write_probe(folder: Path, size: int = SMALL) -> str:
    """Why the disk does not take a file of so many bytes (`disk full (FOLDER)`); empty when it does, or nobody knows.

    Nothing is flushed: a file server that refuses only later is not found out.
    """
    probe = folder / f".probe-{secrets.token_hex(6)}"
    try:
        with probe.open("xb") as stream:
            for start in range(0, size, _BLOCK):
                stream.write(bytes(min(_BLOCK, size - start)))
        return ""
    except OSError as error:
        return explain_disk_error(error, folder)
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
