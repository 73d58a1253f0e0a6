"""The digest of a staged archive: listed, computed, or renewed with another archive."""

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import ConfigError
from orchestrator.submission.stage_digest import fill_stage_digest


def resolved(archive: Path | str, sha256: str = "") -> dict[str, Any]:
    return {"cluster": {"stage": {"archive": str(archive), "sha256": sha256}}}


def filled(data: dict[str, Any], before: dict[str, Any] | None = None) -> str:
    fill_stage_digest(data, before)
    digest: str = data["cluster"]["stage"]["sha256"]
    return digest


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "env.tar"
    path.write_bytes(b"content")
    return path


OWN = hashlib.sha256(b"content").hexdigest()


def test_a_digest_is_computed_unless_it_is_given(archive: Path) -> None:
    assert filled(resolved(archive)) == OWN
    assert filled(resolved(archive, "a" * 64)) == "a" * 64
    assert filled(resolved("")) == ""


def test_a_listed_digest_is_used_while_it_is_newer_than_the_archive(archive: Path) -> None:
    listed = archive.with_name("env.tar.sha256")
    listed.write_text(f"{'B' * 64}  env.tar\n")
    os.utime(archive, (1, 1))
    assert filled(resolved(archive)) == "b" * 64
    os.utime(archive)
    os.utime(listed, (1, 1))
    assert filled(resolved(archive)) == OWN


def test_a_file_that_lists_no_digest_is_refused(archive: Path) -> None:
    archive.with_name("env.tar.sha256").write_text("nothing\n")
    with pytest.raises(ConfigError, match=r"env.tar.sha256 does not begin with a SHA-256 digest"):
        filled(resolved(archive))


def test_a_missing_archive_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster.stage.archive=.*no.tar: No such file or directory"):
        filled(resolved(tmp_path / "no.tar"))


def test_a_named_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "env.tar"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match=r"env.tar: is not a file"):
        filled(resolved(pipe))


def test_a_resumed_run_gets_the_digest_of_another_archive_or_of_one_made_anew(archive: Path) -> None:
    before = resolved("/old.tar", "c" * 64)
    assert filled(resolved(archive, "c" * 64), before) == OWN
    assert filled(resolved(archive, "d" * 64), before) == "d" * 64
    assert filled(resolved(archive, ""), resolved(archive, "c" * 64)) == OWN
    assert filled(resolved(archive, "c" * 64), resolved(archive, "c" * 64)) == "c" * 64
