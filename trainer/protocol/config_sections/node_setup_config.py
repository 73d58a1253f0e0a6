"""Preparation of each node before its ranks start: a staged archive, caches and binding to cores."""

import re
from dataclasses import dataclass, field

from trainer.protocol.config_sections.limits import require_positive

ARCHIVE_ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".sqsh", ".squashfs")
BINDINGS = ("auto", "off")
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """An archive, such as a Python environment, that each node unpacks to its own disk once (docs/environments.md)."""

    archive: str = ""
    """Tar (`.tar`, `.tar.gz`, `.tar.zst`) or squashfs image (`.sqsh`) on the shared file system; empty: none."""
    to: str = "/tmp"
    """Folder on the nodes' own disks, where orch makes `orch-USER/`; `$NAME` is a variable of the node."""
    sha256: str = ""
    """SHA-256 of the archive, which every node checks; empty: `orch submit` reads it from `ARCHIVE.sha256`, or computes
    it."""
    keep_days: float = 7.0
    """Days after which a node's agent deletes an unpacked archive that no job uses."""
    seconds: float = 1800.0
    """Time limit for unpacking on one node."""

    def __post_init__(self) -> None:
        if self.archive and not self.archive.endswith(ARCHIVE_ENDINGS):
            raise ValueError(f"cluster.stage.archive={self.archive}: must end in {', '.join(ARCHIVE_ENDINGS)}")
        if self.sha256 and not _SHA256.fullmatch(self.sha256):
            raise ValueError(f"cluster.stage.sha256={self.sha256}: must be 64 hex digits, as sha256sum prints them")
        require_positive("cluster.stage", self, "keep_days", "seconds")


@dataclass(frozen=True, kw_only=True)
class NodeSetup:
    """Preparation of each node."""

    bind: str = "auto"
    """CPU cores of each rank, within those of the job: `auto` takes the cores of its GPU's NUMA node, or an equal share
    without GPUs; `off` does not bind."""

    caches: str = ""
    """Folder on the nodes' own disks for TMPDIR, HF_HOME and the caches of Triton and TorchInductor, one per rank;
    `$NAME` is a variable of the node; empty: they stay where they are."""

    stage: StageConfig = field(default_factory=StageConfig)

    def __post_init__(self) -> None:
        if self.bind not in BINDINGS:
            raise ValueError(f"cluster.bind={self.bind}: must be {' or '.join(BINDINGS)}")
