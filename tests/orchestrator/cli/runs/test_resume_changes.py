"""`orch resume RUN KEY=VALUE`: what may change of a run that goes on, what needs a word, and what is refused."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.config.run_config import RunConfig
from orchestrator.registry.records import REFUSED
from orchestrator.scheduler.available_schedulers import make_instance
from orchestrator.scheduler.job_environment import package_root
from orchestrator.states import RunState
from orchestrator.submission import create_run, resume_request
from orchestrator.submission.create_run import data_identity, read_index
from orchestrator.submission.run_identity import code, environment
from tests.fakes.slurm_commands import refusing, write_commands
from tests.orchestrator.cli.conftest import Seeds, Type
from tests.orchestrator.tiny_config import tiny_config
from trainer.protocol import skipped_batches
from trainer.protocol.config import build
from trainer.protocol.failures.outcome import Failure, FailureKind
from trainer.protocol.run_dir import RunDir
from trainer.protocol.token_shards import TokenIndex, prepare


class Resumable:
    """A held run with a whole config, made with the code and the environment of now."""

    def __init__(
        self, seeds: Seeds, tmp_path: Path, state: RunState = RunState.HELD, *overrides: str, saved: bool = True
    ) -> None:
        self.store, self.name = seeds.store, seeds.run(state=state)
        data = tiny_config(tmp_path, *overrides)
        identity = {"code": code(build(RunConfig, data)), "env": environment("local")}
        data["data"]["path"] = str(tmp_path)
        self.digest = seeds.store.put_config(data)
        seeds.store.note_run(
            self.name, epoch=seeds.epoch, now=1.0, config_digest=self.digest, total_steps=200, identity=identity
        )
        if saved:
            seeds.checkpoint(self.name, 100)

    def asked(self) -> dict[str, Any]:
        (request,) = self.store.user_requests()
        return dict(request.args)


def test_resume_changes_what_may_change(orch: Type, seeds: Seeds, service: SimpleNamespace, tmp_path: Path) -> None:
    run = Resumable(seeds, tmp_path)
    words = ["optimizer.lr=0.5", "cluster.nodes=4", "parallel.dp_shard=0"]
    assert orch("resume", run.name, *words, "--no-controller").code == 0
    changed = run.store.config(run.asked()["config"])
    assert (changed["optimizer"]["lr"], changed["cluster"]["nodes"]) == (0.5, 4)
    assert changed["data"] == run.store.config(run.digest)["data"]


def test_data_may_move_and_may_not_be_other_data(
    orch: Type, seeds: Seeds, service: SimpleNamespace, tmp_path: Path
) -> None:
    for name, text in (("here", "abc" * 999), ("there", "abc" * 999), ("other", "abd" * 999)):
        (tmp_path / f"{name}.txt").write_text(text)
        prepare([str(tmp_path / f"{name}.txt")], tmp_path / name)
    run = Resumable(seeds, tmp_path)
    identity = run.store.run(run.name).identity
    data = data_identity(str(tmp_path / "here"), read_index(str(tmp_path / "here")))
    run.store.note_run(run.name, epoch=seeds.epoch, now=1.0, identity={**identity, "data": data})
    refused = orch("resume", run.name, f"data.path={tmp_path / 'other'}", "--no-controller")
    assert (refused.code, "data.path cannot change: it does not hold the same tokens" in refused.err) == (4, True)
    absent = orch("resume", run.name, f"data.path={tmp_path / 'nowhere'}", "--no-controller")
    assert (absent.code, "orch data prepare" in absent.err) == (2, True), absent.err
    with (tmp_path / "here" / "shard-00000.bin").open("r+b") as shard:
        shard.write(b"x")
    damaged = orch("resume", run.name, f"data.path={tmp_path / 'here'}", "--no-controller")
    assert (damaged.code, "shard-00000.bin changed after index.json was written" in damaged.err) == (2, True)
    assert orch("resume", run.name, f"data.path={tmp_path / 'there'}", "--no-controller").code == 0
    asked = run.asked()
    assert run.store.config(asked["config"])["data"]["path"] == str(tmp_path / "there")
    assert asked["identity"]["data"] == {**data, "path": str(tmp_path / "there")}


@pytest.mark.parametrize("changes", [(), ("optimizer.lr=0.5",)])
def test_data_that_was_overwritten_is_refused_whatever_is_typed(
    orch: Type, seeds: Seeds, service: SimpleNamespace, tmp_path: Path, changes: tuple[str, ...]
) -> None:
    (tmp_path / "text.txt").write_text("abc" * 999)
    prepare([str(tmp_path / "text.txt")], tmp_path / "tokens")
    for path in list((tmp_path / "tokens").iterdir()):
        path.rename(tmp_path / path.name)
    run = Resumable(seeds, tmp_path)
    with (tmp_path / "shard-00000.bin").open("r+b", buffering=0) as shard:
        before = shard.read(1)
        shard.seek(0)
        shard.write(b"x")
        damaged = orch("resume", run.name, *changes, "--no-controller")
        assert (damaged.code, "shard-00000.bin changed after index.json was written" in damaged.err) == (2, True)
        shard.seek(0)
        shard.write(before)
    assert orch("resume", run.name, *changes, "--no-controller").code == 0


def test_resume_shows_slurm_what_it_would_submit(
    orch: Type, seeds: Seeds, service: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "allocation failure: Invalid partition name specified"
    monkeypatch.setenv("PATH", write_commands(tmp_path / "bin", refusing(said)))
    run = Resumable(seeds, tmp_path)
    seeds.store.note_run(run.name, epoch=seeds.epoch, now=1.0, cluster="slurm", scheduler=make_instance("slurm")())
    refused = orch("resume", run.name, "cluster.partition=nope", "--no-controller")
    assert refused.code == 4
    assert "partitions here: low, high: type cluster.partition=low" in refused.err
    assert seeds.store.user_requests() == []
    # What no key of the cluster has changed is not shown to Slurm.
    assert orch("resume", run.name, "optimizer.lr=0.5", "--no-controller").code == 0


@pytest.mark.parametrize("bad", ["lots", "1h"])
def test_a_run_that_was_taken_with_a_wrong_value_can_be_cured(
    orch: Type, seeds: Seeds, service: SimpleNamespace, tmp_path: Path, bad: str
) -> None:
    run = Resumable(seeds, tmp_path)
    data = run.store.config(run.digest)
    data["cluster"] |= {"mem": "lots"} if bad == "lots" else {"time": "1h"}
    run.store.note_run(run.name, epoch=seeds.epoch, now=1.0, config_digest=run.store.put_config(data))
    cure = "cluster.mem=2G" if bad == "lots" else "cluster.time=1:00:00"
    assert orch("resume", run.name, "optimizer.lr=0.5", "--no-controller").code == 2, "it would be held again"
    assert orch("resume", run.name, cure, "--no-controller").code == 0
    key, _, value = cure.removeprefix("cluster.").partition("=")
    assert run.store.config(run.asked()["config"])["cluster"][key] == value


def test_resume_without_changes_asks_for_none(
    orch: Type, seeds: Seeds, service: SimpleNamespace, tmp_path: Path
) -> None:
    run = Resumable(seeds, tmp_path)
    assert orch("resume", run.name, "--no-controller").code == 0
    assert "config" not in run.asked()


@pytest.mark.parametrize(
    ("words", "what", "hint"),
    [
        (["train.seed=5"], "train.seed cannot change", "leave it as it was"),
        (["model.dim=256"], "model.dim cannot change", "leave it as it was"),
        (["train.lrr=1"], "unknown key `train.lrr`", "did you mean `optimizer.lr`"),
        (["optimizer.lr=fast"], "must be a number", "default"),
        (["train.steps=100"], "has trained more already", "train.steps=121 or more"),
        (["checkpoint.tiers=[{path: /scratch}]"], "checkpoint.tiers lacks run", "{path: run}"),
        (["~train.seed", "model.layers=9"], "model.layers cannot change", "leave it as it was"),
    ],
)
def test_resume_refuses_what_may_not_change(
    orch: Type, seeds: Seeds, service: SimpleNamespace, tmp_path: Path, words: list[str], what: str, hint: str
) -> None:
    run = Resumable(seeds, tmp_path)
    refused = orch("resume", run.name, *words)
    assert refused.code in (2, 4)
    assert what in refused.err
    assert hint in refused.err
    assert run.store.user_requests() == []


@pytest.mark.parametrize(
    "words", [["train.seed=5"], ["model.dim=256"], ["train.batch_size=32"], ["data.shuffle=false"]]
)
def test_a_run_that_has_saved_nothing_begins_anew_with_anything(
    orch: Type, seeds: Seeds, service: SimpleNamespace, tmp_path: Path, words: list[str]
) -> None:
    run = Resumable(seeds, tmp_path, saved=False)
    assert orch("resume", run.name, *words, "--no-controller").code == 0
    refused = orch("resume", run.name, *words, f"cluster.root={tmp_path / 'elsewhere'}")
    assert (refused.code, "cluster.root cannot change" in refused.err) == (4, True)


def test_a_run_that_has_saved_nothing_may_be_given_its_data(
    orch: Type, seeds: Seeds, service: SimpleNamespace, tmp_path: Path
) -> None:
    (tmp_path / "book.txt").write_text("once upon a time " * 999)
    run = Resumable(seeds, tmp_path, RunState.FAILED, saved=False)
    assert orch("resume", run.name, f"data.text=[{tmp_path / 'book.txt'}]", "~data.path", "--no-controller").code == 0
    asked = run.asked()
    path = run.store.config(asked["config"])["data"]["path"]
    assert TokenIndex.read(Path(path)).tokens == len("once upon a time " * 999) + 1
    assert asked["identity"]["data"]["path"] == path


@pytest.mark.parametrize("beginning", ["a checkpoint on disk", "another run's", "a tier elsewhere", "a batch to skip"])
def test_what_the_registry_does_not_know_may_be_kept_all_the_same(
    orch: Type, seeds: Seeds, service: SimpleNamespace, tmp_path: Path, beginning: str
) -> None:
    tiers = ["checkpoint.tiers=[{path: run}, {path: /scratch}]"] if beginning == "a tier elsewhere" else []
    run = Resumable(seeds, tmp_path, RunState.HELD, *tiers, saved=False)
    found = run.store.run(run.name)
    if beginning == "a checkpoint on disk":
        (Path(found.run_dir) / "checkpoints" / "step-00000020.001-ab12cd34").mkdir(parents=True)
    elif beginning == "a batch to skip":  # by its place in the data
        attempt = RunDir(Path(found.run_dir)).attempt(1)
        attempt.make()
        skipped_batches.add(attempt, [skipped_batches.Skip(step=3, position=48, reason="loss nan")])
    elif beginning == "another run's":
        identity = {**found.identity, "imported": {"checkpoint": "/elsewhere", "step": 5}}
        run.store.note_run(run.name, epoch=seeds.epoch, now=1.0, identity=identity)
    refused = orch("resume", run.name, "model.dim=256", "--no-controller")
    assert (refused.code, "model.dim cannot change" in refused.err) == (4, True)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["cluster.nodes=3"], "type cluster.nodes=2, or cluster.nodes=4"),
        (["train.batch_size=7"], "leave it as it was"),
    ],
)
def test_resume_never_offers_what_it_would_refuse(
    orch: Type, seeds: Seeds, service: SimpleNamespace, tmp_path: Path, words: list[str], hint: str
) -> None:
    run = Resumable(seeds, tmp_path, RunState.HELD, "parallel.dp_shard=0")
    refused = orch("resume", run.name, *words)
    assert hint in refused.err
    assert "train.batch_size=" not in refused.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("state", "kind", "asks"),
    [
        (RunState.FAILED, "user_error", False),
        (RunState.FAILED, "exception", False),
        (RunState.FAILED, "rank_killed", True),
        (RunState.FAILED, "unknown", True),
        (RunState.FAILED, None, True),
        (RunState.HELD, "numeric", False),
        (RunState.HELD, "out_of_memory", False),
        (RunState.HELD, "storage", True),
        (RunState.HELD, "installation", True),
        (RunState.CANCELLED, None, True),
    ],
)
def test_code_that_was_to_be_fixed_needs_no_word(
    orch: Type, seeds: Seeds, service: SimpleNamespace, tmp_path: Path, state: RunState, kind: str | None, asks: bool
) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "my_model.py").write_text("class Mine: ...\n")
    run = Resumable(seeds, tmp_path, state, f"workload.path=[{folder}]", "workload.target=my_model:Mine")
    failure = None if kind is None else Failure(kind=FailureKind(kind), reason="as it was").to_json()
    seeds.store.note_attempt(run.name, 1, epoch=seeds.epoch, failure=failure)
    (folder / "my_model.py").write_text("class Mine: mended = True\n")
    typed = orch("resume", run.name, "--no-controller")
    assert typed.code == (4 if asks else 0), typed.err
    assert ("--accept code.user" in typed.err) == asks
    assert ("trains on with fixed code" in typed.err) == (not asks)


def test_a_key_that_there_is_not_is_told_before_a_run_is_cancelled_for_it(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    refused = orch("resume", run, "train.lrr=1")
    assert (refused.code, "unknown key `train.lrr`" in refused.err) == (2, True)
    assert f"`orch cancel {run}` stops it" in orch("resume", run, "optimizer.lr=1").err


def test_resume_wants_a_word_for_other_code(
    orch: Type, seeds: Seeds, service: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Resumable(seeds, tmp_path)
    monkeypatch.setattr(resume_request, "environment", lambda kind: {**environment(kind), "torch": "9.9"})
    refused = orch("resume", run.name, "--no-controller")
    assert "env.torch differs from what the run was trained with" in refused.err
    assert f"orch resume {run.name} --accept env.torch" in refused.err
    assert orch("resume", run.name, "--accept", "env.torch", "--no-controller").code == 0
    assert run.asked()["identity"]["env"]["torch"] == "9.9"


def test_what_a_run_goes_on_with_is_the_code_that_was_compared(
    orch: Type, seeds: Seeds, service: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two source trees with one interpreter: the next attempt is of the tree whose `orch resume` was typed."""
    run = Resumable(seeds, tmp_path)
    identity = run.store.run(run.name).identity
    job = {"python": sys.executable, "package_root": "/home/mia/older", "variables": {"LANG": "C"}}
    run.store.note_run(run.name, epoch=seeds.epoch, now=1.0, identity={**identity, "job": job})
    monkeypatch.setattr(resume_request, "environment", lambda kind: {**environment(kind), "torch": "9.9"})
    assert orch("resume", run.name, "--accept", "env.torch", "--no-controller").code == 0
    assert run.asked()["identity"]["job"] == {**job, "package_root": package_root()}


def test_what_differs_from_a_run_that_never_trained_needs_no_word(
    orch: Type, seeds: Seeds, service: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that its training code lacked is installed, for instance."""
    run = Resumable(seeds, tmp_path, saved=False)
    run.store.note_run(run.name, epoch=seeds.epoch, now=1.0, step=0)
    monkeypatch.setattr(resume_request, "environment", lambda kind: {**environment(kind), "torch": "9.9"})
    assert orch("resume", run.name, "--no-controller").code == 0
    assert run.asked()["identity"]["env"]["torch"] == "9.9", "it is recorded all the same"


def test_what_another_interpreter_has_is_not_compared(
    orch: Type, seeds: Seeds, service: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs of the run have the interpreter that it was submitted with, whoever types `orch resume`."""
    run = Resumable(seeds, tmp_path)
    identity = run.store.run(run.name).identity
    job = {"python": "/opt/other/bin/python", "package_root": "", "variables": {}}
    run.store.note_run(run.name, epoch=seeds.epoch, now=1.0, identity={**identity, "job": job})
    monkeypatch.setattr(resume_request, "environment", lambda kind: {**environment(kind), "torch": "9.9"})
    found = orch("resume", run.name, "--no-controller")
    assert found.code == 0
    assert "its attempts have not recorded them, and its jobs have another interpreter" in " ".join(found.err.split())


def test_a_key_that_cannot_be_accepted_is_named(
    orch: Type, seeds: Seeds, service: SimpleNamespace, tmp_path: Path
) -> None:
    run = Resumable(seeds, tmp_path)
    refused = orch("resume", run.name, "--accept", "code.usr")
    assert refused.code == 2
    assert "did you mean --accept code.user?" in refused.err


def test_a_finished_run_goes_on_with_more_steps_only(
    orch: Type, seeds: Seeds, service: SimpleNamespace, tmp_path: Path
) -> None:
    run = Resumable(seeds, tmp_path, RunState.SUCCEEDED)
    refused = orch("resume", run.name)
    assert "is SUCCEEDED: it has finished" in refused.err
    assert f"orch resume {run.name} train.steps=400" in refused.err
    assert orch("resume", run.name, "train.steps=400", "--no-controller").code == 0


def test_a_finished_program_says_what_to_type(
    orch: Type, seeds: Seeds, service: SimpleNamespace, tmp_path: Path
) -> None:
    run = Resumable(seeds, tmp_path, RunState.SUCCEEDED, "command=[true]")
    refused = orch("resume", run.name)
    assert refused.code == 4
    assert "is SUCCEEDED: it has finished\n" in refused.err
    assert refused.err.endswith(f"  `orch show {run.name}` tells how its program ended\n")


def test_the_config_of_a_live_run_stays(orch: Type, seeds: Seeds, service: SimpleNamespace, tmp_path: Path) -> None:
    run = Resumable(seeds, tmp_path, RunState.RUNNING)
    refused = orch("resume", run.name, "optimizer.lr=0.5")
    assert "its configuration changes only while no job of it lives" in refused.err
    assert f"orch cancel {run.name}" in refused.err


def test_further_tiers_may_be_added(orch: Type, seeds: Seeds, service: SimpleNamespace, tmp_path: Path) -> None:
    run = Resumable(seeds, tmp_path)
    tiers = f"checkpoint.tiers=[{{path: run}}, {{path: {tmp_path}}}]"
    assert orch("resume", run.name, tiers, "--no-controller").code == 0
    assert run.asked()["base"] == run.digest


def test_a_further_tier_is_refused_that_is_one_of_the_others_or_has_another_user_s_folder(
    orch: Type, seeds: Seeds, service: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Resumable(seeds, tmp_path)
    (tmp_path / "scratch" / run.name).mkdir(parents=True)
    (tmp_path / "link").symlink_to("scratch")
    both = f"checkpoint.tiers=[{{path: run}}, {{path: {tmp_path / 'scratch'}}}, {{path: {tmp_path / 'link'}}}]"
    refused = orch("resume", run.name, both, "--no-controller")
    assert (refused.code, "two tiers have the same folder" in refused.err) == (2, True)
    one = f"checkpoint.tiers=[{{path: run}}, {{path: {tmp_path / 'scratch'}}}]"
    asked: list[Path] = []
    monkeypatch.setattr(create_run, "_foreign_folder", lambda folder: asked.append(folder) or "belongs to bob")
    refused = orch("resume", run.name, one, "--no-controller")
    assert (refused.code, f"{asked[0]} belongs to bob" in refused.err) == (2, True)
    assert asked == [tmp_path / "scratch" / run.name]


def test_a_change_that_is_refused_by_the_controller_is_no_success(
    orch: Type, seeds: Seeds, service: SimpleNamespace, tmp_path: Path
) -> None:
    """Somebody else has resumed it meanwhile."""
    run = Resumable(seeds, tmp_path)

    def tick(path: object, kind: str, **_: object) -> None:
        (request,) = run.store.user_requests()
        run.store.answer(request.id, f"{REFUSED}{run.name} is RECOVERING", epoch=seeds.epoch, now=1.0)

    service.tick_once = tick
    refused = orch("resume", run.name, "optimizer.lr=0.5", "--no-controller")
    assert refused.code == 4
    assert "is RECOVERING" in refused.out
