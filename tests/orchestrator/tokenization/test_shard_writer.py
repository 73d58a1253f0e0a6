"""Text to token shards: deterministic, atomic, and clear about what it cannot read."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import fsspec
import pytest

from orchestrator.tokenization import shard_writer
from orchestrator.tokenization.documents import STDLIB, expand_sources
from orchestrator.tokenization.tokenizers import SEPARATOR
from trainer.protocol import token_shards
from trainer.protocol.token_shards import TokenIndex, TokensError


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
    index = shard_writer.prepare([text], tmp_path / "out")
    assert numbers(tmp_path / "out") == [97, 98, SEPARATOR, 104, 0xC3, 0xA9, SEPARATOR]
    assert (index.tokens, index.sources, index.skipped, index.dtype) == (7, 2, 0, "uint16")
    assert TokenIndex.read(tmp_path / "out") == index


def test_binary_empty_hidden_and_special_files_are_left_out(text, tmp_path):
    (text / "image.png").write_bytes(b"\x89PNG\0\0")
    (text / "empty").touch()
    (text / ".hidden").write_text("secret")
    os.mkfifo(text / "pipe")
    index = shard_writer.prepare([text], tmp_path / "out")
    assert (index.tokens, index.sources, index.skipped) == (7, 2, 3)


def test_content_and_order_make_the_fingerprint(text, tmp_path):
    first = shard_writer.prepare([text], tmp_path / "one")
    assert shard_writer.prepare([text], tmp_path / "two").fingerprint == first.fingerprint
    swapped = shard_writer.prepare([text / "b", text / "a.txt"], tmp_path / "three")
    assert swapped.tokens == first.tokens
    assert swapped.fingerprint != first.fingerprint


def test_shards_are_cut_at_their_size(text, tmp_path, monkeypatch):
    whole = shard_writer.prepare([text], tmp_path / "one")
    monkeypatch.setattr(shard_writer, "SHARD_TOKENS", 3)
    index = shard_writer.prepare([text], tmp_path / "two")
    assert [shard.tokens for shard in index.shards] == [3, 3, 1]
    assert numbers(tmp_path / "two") == numbers(tmp_path / "one")
    assert index.tokens == whole.tokens


def test_the_same_tokens_are_kept_and_others_refused(text, tmp_path):
    out = tmp_path / "out"
    shard_writer.prepare([text], out)
    written = (out / "index.json").stat().st_ino
    shard_writer.prepare([text], out)
    assert (out / "index.json").stat().st_ino == written
    (text / "more").write_text("more")
    for taken in (out, text, text / "more"):
        with pytest.raises(TokensError, match="exists and contains something else: choose another folder or remove it"):
            shard_writer.prepare([text], taken)
    assert len(numbers(out)) == 7
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "text"]


def test_an_empty_folder_is_filled(text, tmp_path):
    (tmp_path / "out").mkdir()
    assert shard_writer.prepare([text], tmp_path / "out").tokens == 7


def test_prepare_under_gives_every_content_its_own_folder(text, tmp_path):
    first, _ = shard_writer.prepare_under([text], tmp_path / "data")
    assert shard_writer.prepare_under([text], tmp_path / "data")[0] == first
    (text / "more").write_text("more")
    second, index = shard_writer.prepare_under([text], tmp_path / "data")
    assert second != first
    assert second.name == index.fingerprint[:16]
    assert sorted((tmp_path / "data").iterdir()) == sorted([first, second])


def test_progress_ends_at_the_whole(text, tmp_path):
    told: list[tuple[int, int]] = []
    shard_writer.prepare([text], tmp_path / "out", lambda done, total: told.append((done, total)))
    assert told == [(2, 5), (5, 5)]


def test_progress_within_a_file_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("orchestrator.tokenization.documents.CHUNK", 10)
    monkeypatch.setattr(shard_writer, "_TOGETHER", 2)
    (tmp_path / "a.txt").write_text("x" * 25)
    lines = write_lines(tmp_path / "b.jsonl", [{"text": "y" * 5}] * 5)
    told: list[tuple[int, int]] = []
    shard_writer.prepare([tmp_path / "a.txt", lines], tmp_path / "out", lambda *now: told.append(now))
    total = 25 + lines.stat().st_size
    assert told == [(done, total) for done in (10, 20, 25, 35, 45, 50, total)]


ROWS = [{"text": "ab"}, {"text": ""}, {"text": "h\u00e9"}]


def write_lines(path: Path, rows: list[Any]) -> Path:
    lines = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.ndjson"])
def test_each_row_of_json_lines_is_a_document(tmp_path, name):
    index = shard_writer.prepare([write_lines(tmp_path / name, ROWS)], tmp_path / "out")
    assert numbers(tmp_path / "out") == [97, 98, SEPARATOR, 104, 0xC3, 0xA9, SEPARATOR]
    assert (index.sources, index.skipped, index.is_masked) == (1, 0, False)
    rows = [{"body": row["text"]} for row in ROWS]
    other = shard_writer.prepare([write_lines(tmp_path / name, rows)], tmp_path / "other", field="body")
    assert other.fingerprint == index.fingerprint


def test_a_json_file_is_rows_if_it_is_an_array_of_objects_and_text_otherwise(tmp_path):
    (tmp_path / "a.json").write_text(f" {json.dumps(ROWS)}")
    rows = shard_writer.prepare([tmp_path / "a.json"], tmp_path / "out")
    lines = shard_writer.prepare([write_lines(tmp_path / "A.JSONL.gz", ROWS)], tmp_path / "lines")
    assert rows.fingerprint == lines.fingerprint
    (tmp_path / "b.json").write_text("[1]")
    shard_writer.prepare([tmp_path / "b.json"], tmp_path / "text")
    assert numbers(tmp_path / "text") == [*b"[1]", SEPARATOR]


def test_halves_of_characters_and_missing_texts_are_no_error(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud83d"}\n{"text": null}\n')
    shard_writer.prepare([tmp_path / "a.jsonl"], tmp_path / "out")
    assert numbers(tmp_path / "out") == [97, *"\ufffd".encode(), SEPARATOR]


@pytest.mark.parametrize("data", [gzip.compress(b'{"text": "a"}\n' * 99)[:-9], b"no gzip"])
def test_a_damaged_archive_is_told(tmp_path, data):
    (tmp_path / "a.jsonl.gz").write_bytes(data)
    with pytest.raises(TokensError, match="a.jsonl.gz: cannot be read to its end"):
        shard_writer.prepare([tmp_path / "a.jsonl.gz"], tmp_path / "out")


def test_files_at_a_url_are_read_like_local_ones(text, tmp_path):
    local = shard_writer.prepare([text], tmp_path / "out")
    system = fsspec.filesystem("memory")
    for name in ("b/second.txt", "a.txt"):
        system.pipe(f"/corpus/{name}", (text / name).read_bytes())
    found = shard_writer.prepare(["memory://corpus"], tmp_path / "other")
    assert found.fingerprint == local.fingerprint
    with pytest.raises(TokensError, match="memory://nowhere cannot be read"):
        shard_writer.prepare(["memory://nowhere"], tmp_path / "third")


def test_only_the_completion_of_a_prompt_is_trained(tmp_path):
    rows = [{"prompt": "\u00e9?", "completion": "ab"}, {"prompt": "", "completion": "c"}]
    index = shard_writer.prepare([write_lines(tmp_path / "a.jsonl", rows)], tmp_path / "out")
    assert index.is_masked
    bit = 1 << 15
    assert numbers(tmp_path / "out") == [0xC3 | bit, 0xA9 | bit, 63 | bit, 97, 98, SEPARATOR, 99, SEPARATOR]
    assert TokenIndex.read(tmp_path / "out") == index
    plain = shard_writer.prepare([write_lines(tmp_path / "b.jsonl", [{"text": "\u00e9?ab"}])], tmp_path / "plain")
    assert plain.fingerprint != index.fingerprint


def test_a_mixture_refers_to_its_folders(text, tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name * 100)
        shard_writer.prepare([tmp_path / f"{name}.txt"], tmp_path / name)
    out = tmp_path / "mixed"
    index = shard_writer.mix_folders([(tmp_path / "a", 3), (tmp_path / "b", 1)], out)
    assert TokenIndex.read(out) == index
    assert (index.tokens, index.sources, [part.weight for part in index.parts]) == (202, 2, [3, 1])
    assert shard_writer.mix_folders([(tmp_path / "a", 3), (tmp_path / "b", 1)], out) == index
    with pytest.raises(TokensError, match="exists and contains something else"):
        shard_writer.mix_folders([(tmp_path / "a", 1), (tmp_path / "b", 1)], out)
    with pytest.raises(TokensError, match="a folder is named twice"):
        shard_writer.mix_folders([(tmp_path / "a", 1), (tmp_path / "b" / ".." / "a", 2)], tmp_path / "other")
    with pytest.raises(TokensError, match="is a mixture itself: name its folders"):
        shard_writer.mix_folders([(out, 1)], tmp_path / "other")
    (tmp_path / "a" / "shard-00000.bin").write_bytes(b"x" * 202)
    assert index.changed_shards(out) == [f"{tmp_path}/a/shard-00000.bin"]


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([{"body": "a"}], "row 1: has neither text, messages, nor prompt and completion, only body"),
        ([{"text": "a"}, ["b"]], "row 2: must be an object, is a list"),
        ([{"messages": [{"role": "user", "content": "a"}]}], "chats need a tokenizer with a chat template"),
        ([{"text": "a"}, {"prompt": "a", "completion": "b"}], "separate them into files"),
        ([{"messages": ["a"]}], "row 1: message 1 must be an object with role and content"),
        ([{"messages": [{"role": "user", "content": [{"text": "a"}]}]}], "the content of message 1 must be text"),
        ([{"prompt": [], "completion": []}], "prompt and completion must be text; give chats as messages"),
    ],
)
def test_rows_that_are_no_documents_are_told_with_their_place(tmp_path, rows, told):
    with pytest.raises(TokensError, match=f"a.jsonl.*{told}"):
        shard_writer.prepare([write_lines(tmp_path / "a.jsonl", rows)], tmp_path / "out")
    (tmp_path / "b.jsonl").write_text("{")
    with pytest.raises(TokensError, match="b.jsonl: is not JSON: Expecting"):
        shard_writer.prepare([tmp_path / "b.jsonl"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_standard_library_is_some_megabytes_without_its_tests():
    files = expand_sources([STDLIB])
    paths = [Path(file.name) for file in files]
    assert {path.name for path in paths} >= {"argparse.py", "__init__.py"}
    assert all(path.suffix == ".py" for path in paths)
    assert not any(part in ("test", "tests", "site-packages") for path in paths for part in path.parts)
    assert sum(file.size for file in files) > 5e6


@pytest.mark.parametrize(("sources", "message"), [(["nowhere"], "nowhere does not exist"), ([], "empty list of paths")])
def test_nothing_to_read_is_said(tmp_path, sources, message):
    with pytest.raises(TokensError, match=message):
        shard_writer.prepare(sources, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_only_binary_files_is_nothing_to_read(tmp_path):
    (tmp_path / "x").write_bytes(b"\0")
    with pytest.raises(TokensError, match="1 files, none of them text"):
        shard_writer.prepare([tmp_path / "x"], tmp_path / "out")


def test_a_folder_without_index_names_the_remedy(tmp_path):
    with pytest.raises(TokensError, match="orch data prepare"):
        TokenIndex.read(tmp_path)


def test_a_truncated_shard_is_noticed(text, tmp_path):
    index = shard_writer.prepare([text], tmp_path / "out")
    os.truncate(tmp_path / "out" / index.shards[0].name, 4)
    with pytest.raises(TokensError, match="has 4 bytes instead of 14"):
        TokenIndex.read(tmp_path / "out")


@pytest.mark.parametrize("damage", ["[]", "{", '{"schema":"orch.tokens/9"}', '{"schema":"orch.tokens/1"}'])
def test_a_damaged_index_is_an_error_of_ours(tmp_path, damage):
    (tmp_path / "index.json").write_text(damage)
    with pytest.raises(TokensError):
        TokenIndex.read(tmp_path)


def test_the_index_is_plain_json(text, tmp_path):
    shard_writer.prepare([text], tmp_path / "out")
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
    shard_writer.prepare([text], tmp_path / "out")
    overwrite(tmp_path / "out" / "shard-00000.bin")
    with pytest.raises(TokensError, match=r"shard-00000\.bin has changed since it was written: remove"):
        shard_writer.prepare([text], tmp_path / "out")


def test_shards_written_after_the_index_are_compared_with_it(text, tmp_path, monkeypatch):
    monkeypatch.setattr(shard_writer, "SHARD_TOKENS", 3)
    index = shard_writer.prepare([text], tmp_path / "out")
    assert index.shards_changed_lately(tmp_path / "out") == []
    for shard in (tmp_path / "out").glob("shard-*"):
        shard.touch()  # as a copy of the folder, whose shards are written after its index
    assert index.shards_changed_lately(tmp_path / "out") == []
    overwrite(tmp_path / "out" / "shard-00001.bin")
    assert index.shards_changed_lately(tmp_path / "out") == ["shard-00001.bin"]
    monkeypatch.setattr(token_shards, "_CHECKED_BYTES", 6)  # the first shard
    assert index.shards_changed_lately(tmp_path / "out") == []
