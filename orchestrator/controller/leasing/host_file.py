"""Files beside the registry that belong to one host's controller of one scheduler."""

import hashlib
from pathlib import Path

from orchestrator.controller.leasing.lease import host_name


def host_file(store_path: Path, what: str, key: str, host: str = "") -> Path:
    """A file of this host (or another one) for the scheduler `key`: several controllers must not share one."""
    digest = hashlib.sha256(key.encode()).hexdigest()[:8]
    return store_path.with_name(f".{store_path.name}.{what}.{host or host_name()}.{digest}")
