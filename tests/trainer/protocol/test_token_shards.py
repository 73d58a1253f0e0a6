"""Text to token shards: deterministic, atomic, and clear about what it cannot read."""

import json
import os
from pathlib import Path

import pytest

from trainer.protocol import token_shards
from trainer.protocol.token_shards import SEPARATOR, STDLIB, TokenIndex, TokensError


def numbers(folder: Path) -> list[int]:
    data = b"".join((folder / shard.name).read_bytes() for shard in TokenIndex.read(folder).shards)
    return [int.from_bytes(data[at : at + 2], "little") for at in range(0, len(data), 2)]


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "second.txt").write_text("hé")
    (folder / "a.txt").write_text("ab")
    return folder


def test_documents_are_bytes_that_end_with_a_separator(text, tmp_path):
    index = token_shards.prepare([text], tmp_path / "out")
    assert numbers(tmp_path / "out") == [97, 98, SEPARATOR, 104, 0xC3, 0xA9, SEPARATOR]
    assert (index.tokens, index.sources, index.skipped, index.dtype) == (7, 2, 0, "uint16")
    assert TokenIndex.read(tmp_path / "out") == index


def test_binary_empty_hidden_and_special_files_are_left_out(text, tmp_path):
    (text / "image.png").write_bytes(b"\x89PNG\0\0")
    (text / "empty").touch()
    (text / ".hidden").write_text("secret")
    os.mkfifo(text / "pipe")
    index = token_shards.prepare([text], tmp_path / "out")
    assert (index.tokens, index.sources, index.skipped) == (7, 2, 3)


def test_content_and_order_make_the_fingerprint(text, tmp_path):
    first = token_shards.prepare([text], tmp_path / "one")
    assert token_shards.prepare([text], tmp_path / "two").fingerprint == first.fingerprint
    swapped = token_shards.prepare([text / "b", text / "a.txt"], tmp_path / "three")
    assert swapped.tokens == first.tokens
    assert swapped.fingerprint != first.fingerprint


def test_shards_are_cut_at_their_size(text, tmp_path, monkeypatch):
    whole = token_shards.prepare([text], tmp_path / "one")
    monkeypatch.setattr(token_shards, "SHARD_TOKENS", 3)
    index = token_shards.prepare([text], tmp_path / "two")
    assert [shard.tokens for shard in index.shards] == [3, 3, 1]
    assert numbers(tmp_path / "two") == numbers(tmp_path / "one")
    assert index.tokens == whole.tokens


def test_the_same_tokens_are_kept_and_others_refused(text, tmp_path):
    out = tmp_path / "out"
    token_shards.prepare([text], out)
    written = (out / "index.json").stat().st_ino
    token_shards.prepare([text], out)
    assert (out / "index.json").stat().st_ino == written
    (text / "more").write_text("more")
    for taken in (out, text, text / "more"):
        with pytest.raises(TokensError, match="exists and contains something else: choose another folder or remove it"):
            token_shards.prepare([text], taken)
    assert len(numbers(out)) == 7
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "text"]


def test_an_empty_folder_is_filled(text, tmp_path):
    (tmp_path / "out").mkdir()
    assert token_shards.prepare([text], tmp_path / "out").tokens == 7


def test_prepare_under_gives_every_content_its_own_folder(text, tmp_path):
    first, _ = token_shards.prepare_under([text], tmp_path / "data")
    assert token_shards.prepare_under([text], tmp_path / "data")[0] == first
    (text / "more").write_text("more")
    second, index = token_shards.prepare_under([text], tmp_path / "data")
    assert second != first
    assert second.name == index.fingerprint[:16]
    assert sorted((tmp_path / "data").iterdir()) == sorted([first, second])


def test_progress_ends_at_the_whole(text, tmp_path):
    told: list[tuple[int, int]] = []
    token_shards.prepare([text], tmp_path / "out", lambda done, total: told.append((done, total)))
    assert told == [(2, 5), (5, 5)]


def test_the_standard_library_is_some_megabytes_without_its_tests():
    files = token_shards.expand_sources([STDLIB])
    assert {path.name for path in files} >= {"argparse.py", "json", "__init__.py"} - {"json"}
    assert all(path.suffix == ".py" for path in files)
    assert not any(part in ("test", "tests", "site-packages") for path in files for part in path.parts)
    assert sum(path.stat().st_size for path in files) > 5e6


@pytest.mark.parametrize(("sources", "message"), [(["nowhere"], "nowhere does not exist"), ([], "empty list of paths")])
def test_nothing_to_read_is_said(tmp_path, sources, message):
    with pytest.raises(TokensError, match=message):
        token_shards.prepare(sources, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_only_binary_files_is_nothing_to_read(tmp_path):
    (tmp_path / "x").write_bytes(b"\0")
    with pytest.raises(TokensError, match="1 files, none of them text"):
        token_shards.prepare([tmp_path / "x"], tmp_path / "out")


def test_a_folder_without_index_names_the_remedy(tmp_path):
    with pytest.raises(TokensError, match="orch data prepare"):
        TokenIndex.read(tmp_path)


def test_a_truncated_shard_is_noticed(text, tmp_path):
    index = token_shards.prepare([text], tmp_path / "out")
    os.truncate(tmp_path / "out" / index.shards[0].name, 4)
    with pytest.raises(TokensError, match="has 4 bytes instead of 14"):
        TokenIndex.read(tmp_path / "out")


@pytest.mark.parametrize("damage", ["[]", "{", '{"schema":"orch.tokens/9"}', '{"schema":"orch.tokens/1"}'])
def test_a_damaged_index_is_an_error_of_ours(tmp_path, damage):
    (tmp_path / "index.json").write_text(damage)
    with pytest.raises(TokensError):
        TokenIndex.read(tmp_path)


def test_the_index_is_plain_json(text, tmp_path):
    token_shards.prepare([text], tmp_path / "out")
    fields = json.loads((tmp_path / "out" / "index.json").read_text())
    assert fields["schema"] == "orch.tokens/1"
    assert fields["vocab_size"] == 257


def overwrite(shard, data=b"\x07"):
    """Change one byte in place, with the time of the last change that the file had."""
    before = shard.stat()
    with shard.open("r+b") as stream:
        stream.write(data)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_shard_that_was_overwritten_is_not_kept_as_the_same_tokens(text, tmp_path):
    token_shards.prepare([text], tmp_path / "out")
    overwrite(tmp_path / "out" / "shard-00000.bin")
    with pytest.raises(TokensError, match=r"shard-00000\.bin has changed since it was written: remove"):
        token_shards.prepare([text], tmp_path / "out")


def test_shards_written_after_the_index_are_compared_with_it(text, tmp_path, monkeypatch):
    monkeypatch.setattr(token_shards, "SHARD_TOKENS", 3)
    index = token_shards.prepare([text], tmp_path / "out")
    assert index.shards_changed_lately(tmp_path / "out") == []
    for shard in (tmp_path / "out").glob("shard-*"):
        shard.touch()  # as a copy of the folder, whose shards are written after its index
    assert index.shards_changed_lately(tmp_path / "out") == []
    overwrite(tmp_path / "out" / "shard-00001.bin")
    assert index.shards_changed_lately(tmp_path / "out") == ["shard-00001.bin"]
    monkeypatch.setattr(token_shards, "_CHECKED_BYTES", 6)  # the first shard
    assert index.shards_changed_lately(tmp_path / "out") == []
