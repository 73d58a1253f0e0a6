"""Checkpoints of a user's program: found by their names, told to be torn by cheap signs."""

import errno
import io
import json
import os
import random
import struct
import zipfile

import pytest

from trainer.agent.user_command.checkpoints import assess_damage, damage, find, find_other_rank, find_written_later
from trainer.protocol.command_progress import CommandCheckpointsConfig

CONFIG = CommandCheckpointsConfig(path="out")


def safetensors(numbers: int = 4, dtype: str = "F32") -> bytes:
    header = json.dumps({"w": {"dtype": dtype, "shape": [numbers], "data_offsets": [0, 4 * numbers]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4 * numbers)


def archive() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", b"x" * 100)
    return buffer.getvalue()


def garbled(content: bytes) -> bytes:
    """The same with a directory that asks for a later version of the format."""
    at = content.rindex(b"PK\x01\x02") + 6
    return content[:at] + b"\x63" + content[at + 1 :]


WHOLE = {
    "model.safetensors": safetensors(), "optimizer.pt": archive(), "trainer_state.json": b"{}",
    "rng_state_0.pth": b"an older format of torch.save", "note.txt": b"",
}  # fmt: skip


def write(root, name, files):
    (root / name).mkdir()
    for file, content in files.items():
        (root / name / file).write_bytes(content)


@pytest.mark.parametrize(
    ("pattern", "saved", "later"),
    [
        ("ep*-ba*.json", ["ep0-ba10", "ep0-ba20", "ep1-ba30"], ""),
        ("stage*_epoch_*.json", ["stage1_epoch_10", "stage1_epoch_20", "stage2_epoch_10"], "stage2_epoch_10.json"),
        ("stage*_epoch_*.json", ["stage2_epoch_10", "stage1_epoch_20"], ""),  # left from before
        ("loss0.*-step*.json", ["loss0.9-step10", "loss0.5-step20"], ""),
        ("step*.json", ["step20", "step10"], ""),  # one that was written again
    ],
)
def test_steps_that_begin_anew_are_seen_by_names_and_times(tmp_path, pattern, saved, later):
    for at, name in enumerate(saved):
        (tmp_path / f"{name}.json").write_text("{}")
        os.utime(tmp_path / f"{name}.json", ns=(at, at))
    config = CommandCheckpointsConfig(path="out", pattern=pattern)
    found, _ = find(tmp_path, config)
    assert find_written_later(found, config) == later


@pytest.mark.parametrize(
    ("pattern", "name", "step"),
    [
        ("checkpoint-*", "checkpoint-50", 50),
        ("checkpoint-*", "checkpoint-50.tmp", None),
        ("checkpoint-*", "checkpoint-best", None),
        ("checkpoint-*", "xcheckpoint-50", None),
        ("step_*.pt", "step_0007.pt", 7),
        ("epoch=*-step=*.ckpt", "epoch=3-step=1200.ckpt", 1200),
        ("*", "12", 12),
        ("ckpt-*", "ckpt-1795702109199087123", 179570210919908712),  # nanoseconds
        ("ckpt-*", "ckpt-20261126143000123456", 202611261430001234),  # a date with microseconds
        ("ckpt-*", "ckpt-" + "0" * 30 + "7", 7),
        ("*", ".orch-set-aside", None),
    ],
)
def test_the_last_star_of_a_pattern_is_the_step(pattern, name, step):
    assert CommandCheckpointsConfig(pattern=pattern).parse_step(name) == step


@pytest.mark.parametrize("pattern", ["", "checkpoint", "out/checkpoint-*"])
def test_a_pattern_that_names_no_step_is_refused(pattern):
    with pytest.raises(ValueError, match=r"checkpoints\.pattern=.*must be one name with a `\*` for the step"):
        CommandCheckpointsConfig(pattern=pattern)


def test_they_are_found_newest_first_and_a_missing_folder_has_none(tmp_path):
    assert find(tmp_path / "none", CONFIG) == ([], set())
    for name in ("checkpoint-9", "checkpoint-10", "other-11"):
        write(tmp_path, name, WHOLE)
    (newest, older), there = find(tmp_path, CONFIG)
    assert (newest.step, older.step) == (10, 9)
    assert there == {newest.identity, older.identity}
    assert newest.bytes == sum(map(len, WHOLE.values()))
    assert [one.damage for one in assess_damage([newest, older])] == ["", ""]


@pytest.mark.parametrize(
    ("pattern", "step", "main", "others", "not_of_it"),
    [
        ("ep*-ba*-rank0.pt", 30, "ep0-ba{}-rank0.pt", ["ep0-ba{}-rank1.pt", "ep0-ba{}-rank12.pt"], ["ep0-ba300-rank1"]),
        ("rank0-step*.pt", 7, "rank0-step{}.pt", ["rank1-step{}.pt"], ["rank1-step70.pt", "rank1-step07-x.pt"]),
        ("rank*-step*.pt", 7, "rank0-step{}.pt", ["rank1-step{}.pt"], []),
        ("model-*.pt", 30, "model-{}.pt", ["optimizer-{}.pt", "model-{}.pt.md5"], ["notes-30.txt", "optimizer-31.pt"]),
        ("*-*.pt", 30, "model-{}.pt", ["optimizer-{}.pt"], ["optimizer-31.pt"]),
        ("ckpt-*.index", 30, "ckpt-{}.index", ["ckpt-{}.data-00000-of-00001"], ["ckpt-30.tmp-17", "ckpt-3.data-00030"]),
        ("checkpoint-*", 30, "checkpoint-{}", ["checkpoint-{}.optim", "checkpoint-00{}.rng"], ["checkpoint-301"]),
        ("lora-rank8-step*", 30, "lora-rank8-step{}", [], ["lora-rank16-step30", "lora-rank32-step30"]),
        ("rank*-v2*.pt", 30, "rank0-v2{}.pt", ["rank1-v2{}.pt"], ["rank1-v30.pt"]),  # a part of a number
        ("rank*-old-*.pt", 30, "rank0-old-{}.pt", ["rank1-old-{}.pt"], ["rank1-old-30.pt.tmp"]),
    ],
)  # fmt: skip
def test_all_entries_of_a_step_are_one_checkpoint(tmp_path, pattern, step, main, others, not_of_it):
    for name in [main, *others]:
        (tmp_path / name.format(step)).write_bytes(b"x")
        (tmp_path / name.format(2)).write_bytes(b"x")
    for name in not_of_it:
        (tmp_path / name).write_bytes(b"x")
    found, there = find(tmp_path, CommandCheckpointsConfig(pattern=pattern))
    one = next(one for one in found if one.step == step)
    assert (one.path.name, one.siblings) == (main.format(step), tuple(sorted(name.format(step) for name in others)))
    assert one.bytes == 1 + len(others)
    assert {one.identity for one in found} <= there


@pytest.mark.parametrize("stamps", [(1795713545430908070, 1795713540430908070), (20261126143000123456, 0)])
@pytest.mark.parametrize(
    ("pattern", "main", "others"),
    [
        ("rank*-step*.pt", "rank0-step{}.pt", ["rank1-step{}.pt"]),
        ("rank0-step*.pt", "rank0-step{}.pt", ["rank1-step{}.pt"]),
        ("model-*.pt", "model-{}.pt", ["model-{}.pt.md5", "optimizer-{}.pt"]),
    ],
)
def test_numbers_that_are_cut_group_like_others(tmp_path, pattern, main, others, stamps):
    for stamp in stamps:
        for name in (main, *others):
            (tmp_path / name.format(stamp)).write_bytes(b"x")
    (newest, _), _ = find(tmp_path, CommandCheckpointsConfig(pattern=pattern))
    assert (newest.path.name, newest.siblings) == (main.format(stamps[0]), tuple(n.format(stamps[0]) for n in others))


def test_a_sign_of_damage_in_any_entry_is_one_of_the_checkpoint(tmp_path):
    config = CommandCheckpointsConfig(pattern="ep*-ba*-rank0.pt")
    for step in (20, 30):
        for rank in (0, 1):
            (tmp_path / f"ep0-ba{step}-rank{rank}.pt").write_bytes(archive()[: 60 if (step, rank) == (30, 1) else None])
    newest, older = assess_damage(find(tmp_path, config)[0])
    assert newest.damage.startswith("is damaged: ep0-ba30-rank1.pt is not a complete torch.save archive")
    assert older.damage == ""


def test_what_an_older_one_lacks_is_no_sign(tmp_path):
    config = CommandCheckpointsConfig(pattern="model-*.pt")
    for name in ("model-10.pt", "model-20.pt", "optimizer-20.pt", "model-30.pt", "optimizer-30.pt", "ema-30.pt"):
        (tmp_path / name).write_bytes(archive())
    found = assess_damage(find(tmp_path, config)[0])
    assert [(one.step, one.damage) for one in found] == [(30, ""), (20, ""), (10, "")]
    (tmp_path / "model-40.pt").write_bytes(archive())
    (tmp_path / "optimizer-10.pt").write_bytes(archive())
    assert (
        assess_damage(find(tmp_path, config)[0])[0].damage
        == "lacks optimizer-30.pt, which model-30.pt and model-20.pt have"
    )


def test_folders_of_other_ranks_are_seen(tmp_path):
    for name in ("rank0", "rank1", "lora-rank8", "lora-rank16", "alone-rank0"):
        (tmp_path / name / "out").mkdir(parents=True)
    seen = {name: find_other_rank(tmp_path / name / "out") for name in ("rank0", "rank1", "lora-rank8", "alone-rank0")}
    rank0, rank1 = str(tmp_path / "rank0"), str(tmp_path / "rank1")
    assert seen == {"rank0": rank1, "rank1": rank0, "lora-rank8": "", "alone-rank0": ""}
    assert find_other_rank(tmp_path) == ""


def test_a_file_may_be_a_checkpoint(tmp_path):
    (tmp_path / "step_5.pt").write_bytes(archive())
    (tmp_path / "step_6.pt").write_bytes(archive()[:-30])
    newest, older = assess_damage(find(tmp_path, CommandCheckpointsConfig(pattern="step_*.pt"))[0])
    assert (
        newest.damage
        == "is damaged: step_6.pt is not a complete torch.save archive: its directory is missing, so it was truncated"
    )
    assert older.damage == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.safetensors": safetensors()[:-1]}, "is not a complete safetensors file: its values end"),
        ({"model.safetensors": b""}, "model.safetensors is empty"),
        ({"optimizer.pt": archive()[:60]}, "optimizer.pt is not a complete torch.save archive"),
        ({"optimizer.pt": bytes(300)}, "optimizer.pt begins with zeros, which no format does"),
        ({"trainer_state.json": b'{"global_st'}, "trainer_state.json is not a complete JSON file"),
        ({"trainer_state.json": None}, "lacks trainer_state.json, which checkpoint-9 and checkpoint-8 have"),
        ({"trainer_state.json": b"[" * 200_000}, "trainer_state.json is not a readable JSON file: RecursionError"),
        ({"optimizer.pt": garbled(archive())}, "cannot read its directory: NotImplementedError"),
        ({"caf\udce9.json": b"{"}, "is damaged: caf\\udce9.json is not a complete JSON file"),
        ({"trainer_state.json": b'{"global_step": 1, "name": "so'}, "trainer_state.json is not a complete JSON file"),
        ({"trainer_state.json": b'{"step": 1,' + bytes(40)}, "trainer_state.json is not a complete JSON file"),
        ({"trainer_state.json": '{"name": "é'.encode()[:-1]}, "trainer_state.json is not a complete JSON file"),
        ({"log.json": b'{"a": 1}\n{"a": 2}\n'}, ""),
        ({"ds_config.json": b'{\n  // of DeepSpeed\n  "stage": 2\n}\n'}, ""),
        ({"log.json": b'{\n "a": 1\n}\n{\n "a": 2\n}\n'}, ""),
        ({"names.json": '{"name": "é"}'.encode("latin-1")}, ""),
        ({"names.json": '{"name": "é"}'.encode("utf-16")}, ""),
        ({"model.safetensors": safetensors(dtype="F8_E8M0")}, ""),
        ({"model.safetensors": safetensors(dtype="F8_E8M0")[:-1]}, "its values end"),
        ({"rng_state_0.pth": None, "rng_state_1.pth": b"x"}, ""),  # another rank's is as good
        ({"checkpoint-is-incomplete.txt": b""}, "is marked as incomplete"),
        ({name: None for name in WHOLE}, "is an empty folder"),
        ({}, ""),
    ],
)
def test_cheap_signs_of_a_torn_one(tmp_path, change, words):
    write(tmp_path, "checkpoint-8", WHOLE)
    write(tmp_path, "checkpoint-9", WHOLE)
    files = {**WHOLE, **change}
    write(tmp_path, "checkpoint-10", {name: content for name, content in files.items() if content is not None})
    newest, *older = assess_damage(find(tmp_path, CONFIG)[0])
    assert words in newest.damage if words else newest.damage == ""
    assert [one.damage for one in older] == ["", ""]
    assert newest.damage.isprintable()


@pytest.mark.parametrize("marked", [(8, 9, 10), (10,)])
def test_an_empty_file_is_a_marker_where_no_checkpoint_has_it_filled(tmp_path, marked):
    for step in (8, 9, 10):
        write(tmp_path, f"checkpoint-{step}", WHOLE | ({f"done_{step}.bin": b""} if step in marked else {}))
    assert [one.damage for one in assess_damage(find(tmp_path, CONFIG)[0])] == ["", "", ""]
    assert [one.damage for one in assess_damage(find(tmp_path, CONFIG)[0][:1])] == [""]  # the only one that is kept
    (tmp_path / "checkpoint-8" / "done_8.bin").write_bytes(b"x")
    torn = [bool(one.damage) for one in assess_damage(find(tmp_path, CONFIG)[0])]
    assert torn == [True, 9 in marked, False]


def test_torch_writes_an_empty_file_for_a_rank_that_has_nothing_to_write(tmp_path):
    metadata = b"\x80\x04__0_0.distcp\x94"
    write(
        tmp_path,
        "checkpoint-9",
        {"__0_0.distcp": b"x", "__1_0.distcp": b"x", ".metadata": b"__0_0.distcp __1_0.distcp"},
    )
    write(tmp_path, "checkpoint-10", {"__0_0.distcp": b"x", "__1_0.distcp": b"", ".metadata": metadata})
    assert [one.damage for one in assess_damage(find(tmp_path, CONFIG)[0])] == ["", ""]
    (tmp_path / "checkpoint-10" / "__0_0.distcp").write_bytes(b"")
    torn, _ = assess_damage(find(tmp_path, CONFIG)[0])
    assert torn.damage == "is damaged: __0_0.distcp is empty"
    (tmp_path / "checkpoint-10" / ".metadata").unlink()
    unknown, _ = assess_damage(find(tmp_path, CONFIG)[0])
    assert unknown.damage == "is damaged: .metadata is missing beside __0_0.distcp"


def test_a_rank_may_have_nothing_for_a_file_that_other_ranks_fill(tmp_path):
    write(tmp_path, "checkpoint-9", WHOLE | {"seen_0.json": b"[1]", "seen_1.json": b"[2]"})
    write(tmp_path, "checkpoint-10", WHOLE | {"seen_0.json": b"[1]", "seen_1.json": b""})
    assert [one.damage for one in assess_damage(find(tmp_path, CONFIG)[0])] == ["", ""]
    (tmp_path / "checkpoint-10" / "seen_0.json").write_bytes(b"")
    assert assess_damage(find(tmp_path, CONFIG)[0])[0].damage == "is damaged: seen_0.json is empty"


def test_a_file_or_folder_that_the_system_refuses_is_no_sign(tmp_path, monkeypatch):
    write(tmp_path, "checkpoint-9", WHOLE)
    write(tmp_path, "checkpoint-10", WHOLE)
    found = find(tmp_path, CONFIG)[0]
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith(("checkpoint-10", ".pt", ".json", ".safetensors")):
            raise OSError(errno.ESHUTDOWN, os.strerror(errno.ESHUTDOWN), str(path))
        return scandir(path)

    monkeypatch.setattr("trainer.agent.user_command.checkpoints.open_regular", refuse)
    monkeypatch.setattr("os.scandir", refuse)
    assert [one.damage for one in assess_damage(found)] == ["", ""]
    assert [one.step for one in find(tmp_path, CONFIG)[0]] == [9], "what is in the other one is not known"


def test_numbers_that_begin_with_zeros_and_a_blank_text_are_no_signs(tmp_path):
    write(tmp_path, "checkpoint-10", {**WHOLE, "indices.bin": bytes(300), "notes.json": b"\n"})
    assert [one.damage for one in assess_damage(find(tmp_path, CONFIG)[0])] == [""]


def test_what_one_older_one_has_was_put_there_later(tmp_path):
    write(tmp_path, "checkpoint-7", WHOLE)
    write(tmp_path, "checkpoint-8", {**WHOLE, "eval_results.json": b"{}"})
    write(tmp_path, "checkpoint-9", {**WHOLE, "eval_results.json": b"{"})  # it counts for nothing: it is torn
    write(tmp_path, "checkpoint-10", WHOLE)
    assert [bool(one.damage) for one in assess_damage(find(tmp_path, CONFIG)[0])] == [False, True, False, False]


def test_a_list_of_files_that_is_cut_is_compared_with_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.agent.user_command.checkpoints._MOST_FILES", 3)
    for name, files in (("checkpoint-8", "abcd"), ("checkpoint-9", "abcd"), ("checkpoint-10", "wxyz")):
        write(tmp_path, name, dict.fromkeys(files, b"x"))
    found = find(tmp_path, CONFIG)[0]
    assert [one.cut for one in found] == [True] * 3
    assert [one.damage for one in assess_damage(found)] == ["", "", ""]


def test_a_link_that_leads_nowhere_hides_no_checkpoint(tmp_path):
    write(tmp_path, "checkpoint-9", WHOLE)
    write(tmp_path, "checkpoint-10", WHOLE)
    (tmp_path / "checkpoint-10" / "latest").symlink_to("nowhere")
    (tmp_path / "checkpoint-11").symlink_to("nowhere")
    newest, _ = assess_damage(find(tmp_path, CONFIG)[0])
    assert (newest.step, newest.damage, set(newest.files)) == (10, "", set(WHOLE))


def test_files_count_however_deep_they_lie(tmp_path):
    for step, content in ((9, archive()), (10, archive()[:60])):
        deep = tmp_path / f"checkpoint-{step}" / "actor" / "fsdp" / "rank-0" / "model"
        deep.mkdir(parents=True)
        (deep / "state.pt").write_bytes(content)
    newest, older = assess_damage(find(tmp_path, CONFIG)[0])
    assert newest.damage.startswith("is damaged: actor/fsdp/rank-0/model/state.pt is not a complete torch.save archive")
    assert (older.damage, older.bytes) == ("", len(archive()))


@pytest.mark.parametrize("content", ["link", "folders"])
def test_a_folder_that_is_not_listed_to_its_end_is_not_empty(tmp_path, monkeypatch, content):
    (tmp_path / "checkpoint-10").mkdir()
    if content == "link":
        write(tmp_path, "elsewhere", WHOLE)
        (tmp_path / "checkpoint-10" / "model").symlink_to(tmp_path / "elsewhere")
    else:
        monkeypatch.setattr("trainer.agent.user_command.checkpoints._MOST_FOLDERS", 2)
        write(tmp_path, "checkpoint-10/a", {})
        write(tmp_path, "checkpoint-10/a/b", {})
        write(tmp_path, "checkpoint-10/a/b/c", {})
        write(tmp_path, "checkpoint-10/a/b/c/d", WHOLE)
    (one,) = find(tmp_path, CONFIG)[0]
    assert (one.files, damage(one, ())) == ({}, "")


def test_no_garbled_archive_is_more_than_damaged(tmp_path):
    whole, chance = archive(), random.Random(1)
    for _ in range(300):
        content = bytearray(whole)
        content[chance.randrange(whole.index(b"PK\x01\x02"), len(whole))] = chance.randrange(256)
        (tmp_path / "step_5.pt").write_bytes(content)
        ((one,), _) = find(tmp_path, CommandCheckpointsConfig(pattern="step_*.pt"))
        assert damage(one, ()) == "" or "is not a complete torch.save archive" in damage(one, ())
