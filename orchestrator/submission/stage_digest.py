"""The digest of `cluster.stage.archive`, which `orch submit` and `orch resume` record for the nodes to check."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError

_KEY = "cluster.stage.archive"
_LINE = re.compile(r"\\?([0-9a-fA-F]{64})[ \t*]", re.ASCII)  # of sha256sum, which marks escaped names with a backslash


def fill_stage_digest(data: dict[str, Any], before: Mapping[str, Any] | None = None) -> None:
    """Set the digest in a resolved config that has none, or that has the digest of another archive in `before`.

    Raises ConfigError for an unreadable archive.
    """
    stage = data["cluster"]["stage"]
    earlier = before["cluster"]["stage"] if before is not None else stage
    is_stale = stage["archive"] != earlier["archive"] and stage["sha256"] == earlier["sha256"]
    if not stage["archive"]:
        stage["sha256"] = ""
    elif is_stale or not stage["sha256"]:
        stage["sha256"] = _digest(Path(stage["archive"]))


def _digest(archive: Path) -> str:
    """Return the digest in `ARCHIVE.sha256` if that is newer than the archive, or compute it."""
    listed = archive.with_name(f"{archive.name}.sha256")
    try:
        if listed.exists() and listed.stat().st_mtime >= archive.stat().st_mtime:
            if (found := _LINE.match(listed.read_text(errors="replace"))) is None:
                hint = f"sha256sum {archive} > {listed}, or delete it"
                raise ConfigError(f"{listed} does not begin with a SHA-256 digest", where=_KEY, hint=hint)
            return found[1].lower()
        if archive.exists() and not archive.is_file():  # reading a named pipe would wait for ever
            hint = "name a tar or squashfs file"
            raise ConfigError(f"{_KEY}={archive}: is not a file", where=_KEY, hint=hint)
        with archive.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        what = f"{_KEY}={archive}: {error.strerror or error}"
        raise ConfigError(what, where=_KEY, hint="the archive must be on the shared file system") from error
