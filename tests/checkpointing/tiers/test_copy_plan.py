"""What is due in a tier, and which rank copies it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.format.manifest import FileEntry
from checkpointing.storage.digests import CHUNK, digest
from checkpointing.tiers.copy_files import CopyChoice, TierContents, choose_checkpoint, divide_files
from tests.checkpointing.made_checkpoint import NONCE


def name(step: int, attempt: int = 1) -> str:
    return f"step-{step:08d}.{attempt:03d}-{NONCE}"


def content(*steps: int) -> TierContents:
    return TierContents(tuple(name(step) for step in steps))


@pytest.mark.parametrize(
    ("contents", "facts", "expected"),
    [
        ([content(), content()], {}, CopyChoice(None, 0, "no faster tier has a checkpoint that can be trusted")),
        ([content(30, 20), content()], {}, CopyChoice(name(30), 0, "there is none yet")),
        ([content(30, 20), content(30)], {}, CopyChoice(None, 0, "the newest one is there already")),
        ([content(30, 20), content(20)], {}, CopyChoice(name(30), 0, "there is a newer one")),
        ([content(30), content(20)], {"every": 10}, CopyChoice(name(30), 0, "there is a newer one")),
        (
            [content(30), content(20)],
            {"every": 11},
            CopyChoice(None, 0, "it is 10 steps newer than the newest one there, 11 are asked for"),
        ),
        (
            [content(30), content(20)],
            {"every": 11, "everything": True},
            CopyChoice(name(30), 0, "the last one goes everywhere"),
        ),
        # After a roll-back from 30 to 20, 25 is the newest work.
        ([content(30, 25), content(30)], {"latest": name(25)}, CopyChoice(name(25), 0, "there is a newer one")),
        ([content(30, 26), content(30, 25)], {"latest": name(26), "last": name(25), "every": 5}, None),
        # The fastest tier that has it is read.
        ([content(20), content(30, 20), content()], {}, CopyChoice(name(30), 1, "there is none yet")),
        ([content(30), content(30), content()], {}, CopyChoice(name(30), 0, "there is none yet")),
        # What was just committed may be gone again.
        ([content(40), content()], {"latest": name(35)}, CopyChoice(name(40), 0, "there is none yet")),
    ],
)
def test_a_tier_receives_what_is_due(
    contents: list[TierContents], facts: dict[str, Any], expected: CopyChoice | None
) -> None:
    choice = choose_checkpoint(contents, len(contents) - 1, **facts)
    if expected is None:
        assert choice.name is None
    else:
        assert choice == expected


def entry(file: str, size: int) -> FileEntry:
    return FileEntry(name=file, size=size, chunks=(digest(b""),) * -(-size // CHUNK))


def test_ranks_copy_their_own_shards_and_share_the_rest() -> None:
    files = [entry("__0_0.distcp", 10), entry("__1_0.distcp", 500), entry(".metadata", 50), entry("index.json", 60)]
    first, second = divide_files(files, [None, None])
    assert {file.name for file in first} == {"__0_0.distcp", ".metadata", "index.json"}
    assert {file.name for file in second} == {"__1_0.distcp"}


def test_shards_of_ranks_that_are_no_more_are_shared_too() -> None:
    files = [entry(f"__{rank}_0.distcp", 100) for rank in range(6)]
    assert [len(part) for part in divide_files(files, [None, None])] == [3, 3]


def test_a_file_is_copied_by_a_rank_that_sees_it() -> None:
    files = [entry("__0_0.distcp", 10), entry("__1_0.distcp", 10)]
    seen = [frozenset({"__1_0.distcp"}), frozenset({"__0_0.distcp"})]
    assert [[file.name for file in part] for part in divide_files(files, seen)] == [["__1_0.distcp"], ["__0_0.distcp"]]
    with pytest.raises(ValueError, match="__1_0.distcp is on no node"):
        divide_files(files, [frozenset({"__0_0.distcp"}), frozenset()])


@given(st.lists(st.integers(0, 10**9), max_size=12), st.integers(1, 5))
def test_every_file_is_copied_exactly_once(sizes: list[int], ranks: int) -> None:
    files = [entry(f"__{at}_0.distcp" if at % 2 else f"f{at}", size % CHUNK) for at, size in enumerate(sizes)]
    shares = divide_files(files, [None] * ranks)
    assert sorted(file.name for part in shares for file in part) == sorted(file.name for file in files)
