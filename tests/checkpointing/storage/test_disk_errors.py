"""An error of a storage names the place that it is about: a tier is not mistaken for the run's own folder."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from checkpointing.storage.backends import FsspecStorage, LocalStorage
from checkpointing.storage.durable import fsync_dir, fsync_file
from checkpointing.storage.storage_errors import as_oserror, explain_disk_error

RUN = Path("/runs/run-1")
"""The folder that the caller named."""


class AwayError(Exception):
    """An error raised by a library."""


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize(
    "use",
    [
        lambda storage: storage.list(""),
        lambda storage: storage.open("step/COMMIT"),
        lambda storage: storage.publish("step/COMMIT", b""),
        lambda storage: storage.create("step/shard"),
        lambda storage: storage.delete("step/shard"),
    ],
)
@pytest.mark.parametrize("error", [AwayError("no credentials"), OSError(errno.EIO, "AwayError: no credentials")])
def test_an_object_store_that_fails_is_named_by_its_url(
    monkeypatch: pytest.MonkeyPatch, use: Callable[[FsspecStorage], Any], error: Exception
) -> None:
    monkeypatch.setattr("checkpointing.storage.storage_errors._FOREIGN", ((__name__, "AwayError"),))
    filesystem = fsspec.filesystem("memory", skip_instance_cache=True)
    for name in ("ls", "open", "pipe_file", "exists", "rm_file", "isdir", "makedirs"):
        monkeypatch.setattr(filesystem, name, failing(error))
    with pytest.raises(OSError, match="AwayError: no credentials") as caught:
        use(FsspecStorage(filesystem, "/bucket/run-1"))
    reported = explain_disk_error(caught.value, RUN)
    assert reported.startswith("memory:///bucket/run-1")
    assert reported.endswith(": AwayError: no credentials")


def test_a_write_and_a_flush_that_fail_name_the_folder_of_their_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").touch()
    full = failing(OSError(errno.ENOSPC, "No space left on device"))

    def reported(use: Callable[[], Any]) -> str:
        with pytest.raises(OSError, match="No space left") as caught:
            use()
        return explain_disk_error(caught.value, RUN)

    def write(name: str) -> None:
        file = LocalStorage(tmp_path).create(name)
        file.write(b"data")
        file.close()

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        assert reported(lambda: write("one")) == f"disk full ({tmp_path})"
    monkeypatch.setattr(os, "fsync", full)
    uses = (lambda: write("two"), lambda: fsync_file(tmp_path / "there"), lambda: fsync_dir(tmp_path))
    assert [reported(use) for use in uses] == [f"disk full ({tmp_path})"] * 3


def test_an_error_of_a_library_that_is_a_text_alone_keeps_its_text() -> None:
    """s3fs reports a refused request this way; with a file's name it printed as "[Errno None] None"."""
    with pytest.raises(PermissionError) as caught, as_oserror("s3://bucket/x"):
        raise PermissionError("The provided token has expired.")
    assert str(caught.value) == "[Errno 13] The provided token has expired.: 's3://bucket/x'"
    with pytest.raises(FileNotFoundError, match="NoSuchBucket"), as_oserror("s3://bucket/x"):
        raise FileNotFoundError("NoSuchBucket")
