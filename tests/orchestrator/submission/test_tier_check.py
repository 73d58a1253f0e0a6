"""Unusable tiers are refused by name before the submit."""

import os
from pathlib import Path

import pytest

from checkpointing.config import CheckpointConfig, TierConfig
from checkpointing.tiers import tier
from orchestrator.config.run_config import RunConfig
from orchestrator.errors import ConfigError, Precondition
from orchestrator.submission.create_run import _judge, check_tier_folders, checking_tiers
from orchestrator.submission.user_code import ChildAnswer
from tests.orchestrator.ordinary_user import folder_of_an_ordinary_user
from trainer.protocol.run_dir import RunDir


def check(*tiers: TierConfig) -> None:
    config = RunConfig(checkpoint=CheckpointConfig(tiers=tiers))
    with checking_tiers(config, os.environ) as finish:
        finish(lambda words: None)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("gs://bucket/runs", "a library is missing: "),
        ("nope://bucket", "Protocol not known"),
        ("file:///proc/1/no/such/folder", "No such file or directory"),
    ],
)
def test_why_a_tier_cannot_be_used(url: str, reason: str) -> None:
    refused = tier.refusal(url)
    assert refused is not None
    assert reason in refused[0]


def test_a_tier_that_works_keeps_nothing_of_the_probe(tmp_path: Path) -> None:
    assert tier.refusal(f"file://{tmp_path}/new") is None
    assert list((tmp_path / "new").iterdir()) == []


def test_the_tier_is_named_with_the_remedy() -> None:
    with pytest.raises(
        Precondition, match=r"checkpoint\.tiers: nope://bucket cannot be used: Protocol not known"
    ) as caught:
        check(TierConfig(), TierConfig(path="memory://works"), TierConfig(path="nope://bucket"))
    assert "nope://" in caught.value.hint


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (ChildAnswer(found={"trying": "s3://b"}), "s3://b cannot be used: no answer within 30 s"),
        (ChildAnswer(found={"trying": "s3://b"}, died="killed by SIGSEGV"), "s3://b cannot be used: killed by SIGSEGV"),
    ],
)
def test_a_tier_that_does_not_answer_is_refused(answer: ChildAnswer, words: str) -> None:
    with pytest.raises(Precondition, match=words):
        _judge(answer)


def test_folders_are_looked_at_without_making_them(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check(TierConfig(path=str(tmp_path / "new" / "deep")), TierConfig(path="beside-the-run"))
    check(TierConfig(), TierConfig(path=str(tmp_path / "file" / "of-a-node"), shared=False))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(Precondition, match=f"{tmp_path / 'file'} is not a folder"):
        check(TierConfig(path=str(tmp_path / "file" / "below")))


def test_a_folder_that_may_not_be_written_is_refused() -> None:
    with folder_of_an_ordinary_user() as folder:
        (folder / "theirs").mkdir()
        (folder / "theirs").chmod(0o500)
        with pytest.raises(Precondition, match=f"{folder / 'theirs'} is not writable"):
            check(TierConfig(path=str(folder / "theirs" / "mine")))


def check_name(*tiers: TierConfig, name: str = "gpt-1") -> None:
    folder = RunDir(Path("/nowhere") / name)
    check_tier_folders(RunConfig(name="gpt", checkpoint=CheckpointConfig(tiers=tiers)), folder)


def test_a_folder_of_another_user_with_the_run_s_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpt-1").mkdir()
    scratch = TierConfig(path=str(tmp_path))
    check_name(scratch, TierConfig())
    check_name(scratch, name="gpt-2")
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(ConfigError, match=f"{tmp_path}/gpt-1 already exists and belongs to ") as caught:
        check_name(TierConfig(), scratch)
    assert caught.value.hint == "set name=OTHER, or give the tier another path"
    check_name(TierConfig(), TierConfig(path=str(tmp_path), shared=False))


@pytest.mark.parametrize("closed", ["gpt-1", "."])
def test_a_folder_with_the_run_s_name_that_cannot_be_read_is_refused(closed: str) -> None:
    with folder_of_an_ordinary_user() as folder:
        (folder / "scratch" / "gpt-1").mkdir(parents=True)
        (folder / "scratch" / closed).chmod(0)
        why = (
            "already exists, but you cannot read and write it"
            if closed == "gpt-1"
            else "cannot be read: Permission denied"
        )
        with pytest.raises(ConfigError, match=f"{folder}/scratch/gpt-1 {why}"):
            check_name(TierConfig(path=str(folder / "scratch")))
        (folder / "scratch" / closed).chmod(0o700)


@pytest.mark.parametrize("made", [True, False], ids=["after a save", "before"])
def test_two_tiers_that_are_one_folder_are_refused(tmp_path: Path, made: bool) -> None:
    (tmp_path / "scratch" / ("gpt-1" if made else "gpt")).mkdir(parents=True)
    (tmp_path / "link").symlink_to("scratch")
    fast, link = TierConfig(path=str(tmp_path / "scratch")), TierConfig(path=str(tmp_path / "link"), keep=5)
    with pytest.raises(ConfigError, match=f"same folder: {tmp_path}/scratch/gpt-1 and {tmp_path}/link/gpt-1"):
        check_name(fast, TierConfig(), link)
    check_name(fast, TierConfig(), TierConfig(path=str(tmp_path / "link" / "gpt")))
    check_name(fast, TierConfig(path=str(tmp_path / "link"), shared=False))


def test_a_tier_that_is_the_run_s_own_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "gpt-1" / "checkpoints").mkdir(parents=True)
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "gpt-1").symlink_to(tmp_path / "gpt-1" / "checkpoints")
    tiers = (TierConfig(), TierConfig(path=str(tmp_path / "scratch")))
    config = RunConfig(checkpoint=CheckpointConfig(tiers=tiers))
    with pytest.raises(ConfigError, match="two tiers have the same folder"):
        check_tier_folders(config, RunDir(tmp_path / "gpt-1"), known=("run",))
