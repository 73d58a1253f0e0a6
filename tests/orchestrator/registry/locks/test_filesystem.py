"""Which mount holds a path."""

from pathlib import Path

import pytest

from orchestrator.registry.locks.filesystem import mount_of, mounted

MOUNTINFO = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /home rw,nosuid shared:2 master:1 - nfs4 server:/home rw,vers=4.2,local_lock=none
31 22 0:41 / /home/ann\\040lee rw - lustre 10.0.0.1@tcp:/fs rw,flock
32 30 0:42 / /home/local rw - xfs /dev/sdb rw
33 22 0:43 / /old rw - nfs server:/old rw,nolock
34 33 0:44 / /old rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "source", "local"),
    [
        ("/var/lib/x.db", "ext4", "/dev/sda1", True),
        ("/home/bob/x.db", "nfs4", "server:/home", False),
        ("/home/ann lee/x.db", "lustre", "10.0.0.1@tcp:/fs", False),
        ("/home/local/x.db", "xfs", "/dev/sdb", True),
        ("/homework/x.db", "ext4", "/dev/sda1", True),
        ("/old/x.db", "tmpfs", "tmpfs", True),
    ],
)
def test_the_longest_and_latest_mount_holds_a_path(path: str, kind: str, source: str, local: bool) -> None:
    mount = mount_of(Path(path), MOUNTINFO)
    assert mount is not None
    assert (mount.kind, mount.source, mount.is_local) == (kind, source, local)


def test_this_machine_has_mounts(tmp_path: Path) -> None:
    assert mounted(tmp_path) is not None
