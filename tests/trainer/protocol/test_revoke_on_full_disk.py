"""An attempt can be fenced off on a disk that takes no new file."""

from contextlib import suppress
from pathlib import Path

import pytest

from tests.checkpointing.proofs.mounts import small_tmpfs
from trainer.protocol.launch_token import LaunchToken, holds, is_revoked, revoke


def test_an_attempt_is_fenced_off_without_a_free_inode(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "disk", "1m,nr_inodes=6") as disk:
        go, token = disk / "GO", LaunchToken(attempt=1, epoch=1, job_id="7", nonce="0badcafe")
        token.write(go)
        with suppress(OSError):
            for number in range(100):
                (disk / f"file-{number}").touch()
        with pytest.raises(OSError, match="No space left"):
            (disk / "another").touch()
        assert holds(go, token)
        revoke(go)
        assert is_revoked(go)
        assert not holds(go, token)
        revoke(go)
        assert is_revoked(go)
