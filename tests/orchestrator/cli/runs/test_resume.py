"""`orch resume RUN KEY=VALUE`: what may change of a run that goes on, what needs a word, and what is refused."""

import subprocess
import sys
from functools import partial
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
from orchestrator.tokenization.shard_writer import prepare
from tests.fakes.slurm_commands import refusing, write_commands
from tests.installed_distributions import install
from tests.orchestrator.cli.conftest import Patch, Seeds, Type
from tests.orchestrator.tiny_config import tiny_config
from trainer.protocol import skipped_batches
from trainer.protocol.failures.outcome import Failure, FailureKind
from trainer.protocol.plain_data import build
from trainer.protocol.run_dir import RunDir
from trainer.protocol.token_shards import TokenIndex
from trainer.protocol.user_code.code_record import CodeFile, CodeRecord
from trainer.protocol.user_code.installed_packages import read_versions

pytestmark = pytest.mark.usefixtures("service")


class Resumable:
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


@pytest.fixture
def run(seeds: Seeds, tmp_path: Path) -> Resumable:
    return Resumable(seeds, tmp_path)


def test_resume_with_changes(orch: Type, run: Resumable) -> None:
    words = ["optimizer.lr=0.5", "cluster.nodes=4", "parallel.dp_shard=0"]
    assert orch("resume", run.name, *words, "--no-controller").code == 0
    changed = run.store.config(run.asked()["config"])
    assert (changed["optimizer"]["lr"], changed["cluster"]["nodes"]) == (0.5, 4)
    assert changed["data"] == run.store.config(run.digest)["data"]


def test_data_may_move(orch: Type, run: Resumable, seeds: Seeds, tmp_path: Path) -> None:
    for name, text in (("here", "abc" * 999), ("there", "abc" * 999), ("other", "abd" * 999)):
        (tmp_path / f"{name}.txt").write_text(text)
        prepare([str(tmp_path / f"{name}.txt")], tmp_path / name)
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
def test_overwritten_data_is_refused(orch: Type, run: Resumable, tmp_path: Path, changes: tuple[str, ...]) -> None:
    (tmp_path / "text.txt").write_text("abc" * 999)
    prepare([str(tmp_path / "text.txt")], tmp_path / "tokens")
    for path in list((tmp_path / "tokens").iterdir()):
        path.rename(tmp_path / path.name)
    with (tmp_path / "shard-00000.bin").open("r+b", buffering=0) as shard:
        before = shard.read(1)
        shard.seek(0)
        shard.write(b"x")
        damaged = orch("resume", run.name, *changes, "--no-controller")
        assert (damaged.code, "shard-00000.bin changed after index.json was written" in damaged.err) == (2, True)
        shard.seek(0)
        shard.write(before)
    assert orch("resume", run.name, *changes, "--no-controller").code == 0


def test_slurm_checks_change(orch: Type, run: Resumable, seeds: Seeds, tmp_path: Path, monkeypatch: Patch) -> None:
    said = "allocation failure: Invalid partition name specified"
    monkeypatch.setenv("PATH", write_commands(tmp_path / "bin", refusing(said)))
    seeds.store.note_run(run.name, epoch=seeds.epoch, now=1.0, cluster="slurm", scheduler=make_instance("slurm")())
    refused = orch("resume", run.name, "cluster.partition=nope", "--no-controller")
    assert refused.code == 4
    assert "partitions here: low, high: type cluster.partition=low" in refused.err
    assert seeds.store.user_requests() == []
    # What no key of the cluster has changed is not shown to Slurm.
    assert orch("resume", run.name, "optimizer.lr=0.5", "--no-controller").code == 0


@pytest.mark.parametrize("bad", ["lots", "1h"])
def test_correct_invalid_value(orch: Type, run: Resumable, seeds: Seeds, bad: str) -> None:
    data = run.store.config(run.digest)
    data["cluster"] |= {"mem": "lots"} if bad == "lots" else {"time": "1h"}
    run.store.note_run(run.name, epoch=seeds.epoch, now=1.0, config_digest=run.store.put_config(data))
    cure = "cluster.mem=2G" if bad == "lots" else "cluster.time=1:00:00"
    assert orch("resume", run.name, "optimizer.lr=0.5", "--no-controller").code == 2, "it would be held again"
    assert orch("resume", run.name, cure, "--no-controller").code == 0
    key, _, value = cure.removeprefix("cluster.").partition("=")
    assert run.store.config(run.asked()["config"])["cluster"][key] == value


def test_resume_without_changes(orch: Type, run: Resumable) -> None:
    assert orch("resume", run.name, "--no-controller").code == 0
    assert "config" not in run.asked()


@pytest.mark.parametrize(
    ("words", "what", "hint"),
    [
        (["train.seed=5"], "train.seed cannot change", "keep the old value"),
        (["model.dim=256"], "model.dim cannot change", "keep the old value"),
        (["train.lrr=1"], "unknown key `train.lrr`", "keys in `train`"),
        (["optimizer.lr=fast"], "must be a number", "default"),
        (["train.steps=100"], "has already trained that many", "train.steps=121 or more"),
        (["checkpoint.tiers=[{path: /scratch}]"], "checkpoint.tiers lacks run", "{path: run}"),
        (["~train.seed", "model.layers=9"], "model.layers cannot change", "keep the old value"),
    ],
)
def test_refused_change(orch: Type, run: Resumable, words: list[str], what: str, hint: str) -> None:
    refused = orch("resume", run.name, *words)
    assert refused.code in (2, 4)
    assert what in refused.err
    assert hint in refused.err
    assert run.store.user_requests() == []


@pytest.mark.parametrize(
    "words", [["train.seed=5"], ["model.dim=256"], ["train.batch_size=32"], ["data.shuffle=false"]]
)
def test_unsaved_run_may_change(orch: Type, seeds: Seeds, tmp_path: Path, words: list[str]) -> None:
    run = Resumable(seeds, tmp_path, saved=False)
    assert orch("resume", run.name, *words, "--no-controller").code == 0
    refused = orch("resume", run.name, *words, f"cluster.root={tmp_path / 'elsewhere'}")
    assert (refused.code, "cluster.root cannot change" in refused.err) == (4, True)


def test_unsaved_run_may_get_data(orch: Type, seeds: Seeds, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("once upon a time " * 999)
    run = Resumable(seeds, tmp_path, RunState.FAILED, saved=False)
    assert orch("resume", run.name, f"data.text=[{tmp_path / 'book.txt'}]", "~data.path", "--no-controller").code == 0
    asked = run.asked()
    path = run.store.config(asked["config"])["data"]["path"]
    assert TokenIndex.read(Path(path)).tokens == len("once upon a time " * 999) + 1
    assert asked["identity"]["data"]["path"] == path


@pytest.mark.parametrize("beginning", ["a checkpoint on disk", "another run's", "a tier elsewhere", "a batch to skip"])
def test_unregistered_progress_counts(orch: Type, seeds: Seeds, tmp_path: Path, beginning: str) -> None:
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
        (["cluster.nodes=3"], "type cluster.nodes=2"),
        (["train.batch_size=7"], "keep the old value"),
    ],
)
def test_hint_is_accepted(orch: Type, seeds: Seeds, tmp_path: Path, words: list[str], hint: str) -> None:
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
def test_fixed_code(orch: Type, seeds: Seeds, tmp_path: Path, state: RunState, kind: str | None, asks: bool) -> None:
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
    assert ("continues with fixed code" in typed.err) == (not asks)


def test_unknown_key_of_live_run(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    refused = orch("resume", run, "train.lrr=1")
    assert (refused.code, "unknown key `train.lrr`" in refused.err) == (2, True)
    assert f"`orch cancel {run}` stops it" in orch("resume", run, "optimizer.lr=1").err


def test_accept_other_software(orch: Type, run: Resumable, monkeypatch: Patch) -> None:
    monkeypatch.setattr(resume_request, "environment", lambda kind: {**environment(kind), "torch": "9.9"})
    refused = orch("resume", run.name, "--no-controller")
    assert "env.torch differs from the run's training" in refused.err
    assert f"orch resume {run.name} --accept env.torch" in refused.err
    assert orch("resume", run.name, "--accept", "env.torch", "--no-controller").code == 0
    assert run.asked()["identity"]["env"]["torch"] == "9.9"


def test_compared_code_continues(orch: Type, run: Resumable, seeds: Seeds, monkeypatch: Patch) -> None:
    identity = run.store.run(run.name).identity
    job = {"python": sys.executable, "package_root": "/home/mia/older", "variables": {"LANG": "C"}}
    run.store.note_run(run.name, epoch=seeds.epoch, now=1.0, identity={**identity, "job": job})
    monkeypatch.setattr(resume_request, "environment", lambda kind: {**environment(kind), "torch": "9.9"})
    assert orch("resume", run.name, "--accept", "env.torch", "--no-controller").code == 0
    assert run.asked()["identity"]["job"] == {**job, "package_root": package_root()}


def test_untrained_run_accepts_software(orch: Type, seeds: Seeds, tmp_path: Path, monkeypatch: Patch) -> None:
    run = Resumable(seeds, tmp_path, saved=False)
    run.store.note_run(run.name, epoch=seeds.epoch, now=1.0, step=0)
    monkeypatch.setattr(resume_request, "environment", lambda kind: {**environment(kind), "torch": "9.9"})
    assert orch("resume", run.name, "--no-controller").code == 0
    assert run.asked()["identity"]["env"]["torch"] == "9.9", "it is recorded all the same"


def test_other_interpreter_is_not_compared(orch: Type, run: Resumable, seeds: Seeds, monkeypatch: Patch) -> None:
    identity = run.store.run(run.name).identity
    job = {"python": "/opt/other/bin/python", "package_root": "", "variables": {}}
    run.store.note_run(run.name, epoch=seeds.epoch, now=1.0, identity={**identity, "job": job})
    monkeypatch.setattr(resume_request, "environment", lambda kind: {**environment(kind), "torch": "9.9"})
    found = orch("resume", run.name, "--no-controller")
    assert found.code == 0
    assert "its attempts have not recorded them, and its jobs use another interpreter" in " ".join(found.err.split())


def test_unknown_accept_key(orch: Type, run: Resumable) -> None:
    refused = orch("resume", run.name, "--accept", "code.usr")
    assert refused.code == 2
    assert "did you mean --accept code.user?" in refused.err


def test_finished_run_needs_more_steps(orch: Type, seeds: Seeds, tmp_path: Path) -> None:
    run = Resumable(seeds, tmp_path, RunState.SUCCEEDED)
    refused = orch("resume", run.name)
    assert "is SUCCEEDED: it has finished" in refused.err
    assert f"orch resume {run.name} train.steps=400" in refused.err
    assert orch("resume", run.name, "train.steps=400", "--no-controller").code == 0


def test_finished_program(orch: Type, seeds: Seeds, tmp_path: Path) -> None:
    run = Resumable(seeds, tmp_path, RunState.SUCCEEDED, "command=[true]")
    refused = orch("resume", run.name)
    assert refused.code == 4
    assert "is SUCCEEDED: it has finished\n" in refused.err
    assert refused.err.endswith(f"  `orch show {run.name}` shows how its program ended\n")


def test_live_run_keeps_config(orch: Type, seeds: Seeds, tmp_path: Path) -> None:
    run = Resumable(seeds, tmp_path, RunState.RUNNING)
    refused = orch("resume", run.name, "optimizer.lr=0.5")
    assert "its configuration can change only while it has no live job" in refused.err
    assert f"orch cancel {run.name}" in refused.err


def test_added_tiers(orch: Type, run: Resumable, tmp_path: Path) -> None:
    tiers = f"checkpoint.tiers=[{{path: run}}, {{path: {tmp_path}}}]"
    assert orch("resume", run.name, tiers, "--no-controller").code == 0
    assert run.asked()["base"] == run.digest


def test_unusable_tier_is_refused(orch: Type, run: Resumable, tmp_path: Path, monkeypatch: Patch) -> None:
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


def test_refusal_by_controller(orch: Type, run: Resumable, seeds: Seeds, service: SimpleNamespace) -> None:
    def tick(path: object, kind: str, **_: object) -> None:
        (request,) = run.store.user_requests()
        run.store.answer(request.id, f"{REFUSED}{run.name} is RECOVERING", epoch=seeds.epoch, now=1.0)

    service.tick_once = tick
    refused = orch("resume", run.name, "optimizer.lr=0.5", "--no-controller")
    assert refused.code == 4
    assert "is RECOVERING" in refused.out


class Repository:
    def __init__(self, seeds: Seeds, tmp_path: Path) -> None:
        self.folder = tmp_path / "code"
        self.folder.mkdir()
        (self.folder / "my_model.py").write_text("import hidden_part\nclass Mine: ...\n")
        (self.folder / "hidden_part.py").write_text("width = 1\n")
        (self.folder / ".gitignore").write_text("hidden_part.py\n")
        self.commit("init", "-q")
        self.commit("add", ".")
        self.commit("commit", "-qm", "one")
        self.run = Resumable(
            seeds, tmp_path, RunState.HELD, f"workload.path=[{self.folder}]", "workload.target=my_model:Mine"
        )

    def commit(self, *words: str) -> None:
        author = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", str(self.folder), *author, *words], check=True)


def test_files_beside_the_code(orch: Type, seeds: Seeds, tmp_path: Path) -> None:
    code = Repository(seeds, tmp_path)
    for name in ("README.md", "out.log", "runs.db"):
        (code.folder / name).write_text("grows")
    code.commit("add", "README.md")
    code.commit("commit", "-qm", "words")
    (code.folder / "out.log").write_text("grows further")
    assert orch("resume", code.run.name, "--no-controller").code == 0


def test_ignored_file_is_code(orch: Type, seeds: Seeds, tmp_path: Path) -> None:
    code = Repository(seeds, tmp_path)
    (code.folder / "hidden_part.py").write_text("width = 2\n")
    refused = orch("resume", code.run.name, "--no-controller")
    assert (refused.code, "code.user: hidden_part changed" in refused.err) == (4, True), refused.err
    assert orch("resume", code.run.name, "--accept", "code.user", "--no-controller").code == 0


def test_compares_with_trained_code(orch: Type, seeds: Seeds, tmp_path: Path) -> None:
    code = Repository(seeds, tmp_path)
    (code.folder / "hidden_part.py").write_text("width = 2\n")
    attempt = RunDir(Path(code.run.store.run(code.run.name).run_dir)).attempt(1)
    attempt.path.mkdir(parents=True, exist_ok=True)
    recorded = {"hidden_part": code.folder / "hidden_part.py", "found_late": tmp_path / "found_late.py"}
    (tmp_path / "found_late.py").write_text("")
    CodeRecord(files={name: CodeFile.read(path) for name, path in recorded.items()}).write(attempt.code)
    assert orch("resume", code.run.name, "--no-controller").code == 0
    (tmp_path / "found_late.py").write_text("other = 1")
    assert "code.user: found_late changed" in orch("resume", code.run.name, "--no-controller").err


def test_missing_module(orch: Type, seeds: Seeds, tmp_path: Path) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    module = folder / "my_model.py"
    module.write_text("class Mine: ...\n")
    run = Resumable(seeds, tmp_path, RunState.HELD, f"workload.path=[{folder}]", "workload.target=my_model:Mine")
    module.rename(folder / "my_model2.py")
    refused = orch("resume", run.name, "optimizer.lr=0.5")
    assert (refused.code, "put the file back" in refused.err, "my_model2" in refused.err) == (2, True, False)


class TrainedPackages:
    def __init__(self, seeds: Seeds, tmp_path: Path, *overrides: str) -> None:
        self.run, self.site = Resumable(seeds, tmp_path, RunState.HELD, *overrides), tmp_path / "site"
        identity = self.run.store.run(self.run.name).identity
        env = {**identity["env"], "packages": {"timm": "1.0", "torch": "1.0"}, "torch": "1.0"}  # of the submit
        job = {"python": "/opt/other/bin/python", "package_root": "", "variables": {}}
        self.run.store.note_run(
            self.run.name, epoch=seeds.epoch, now=1.0, identity={**identity, "env": env, "job": job}
        )
        for name, version in (("timm", "2.0"), ("torch", "2.0"), ("black", "1.0")):
            install(self.site, name, version)
        attempt = RunDir(Path(self.run.store.run(self.run.name).run_dir)).attempt(1)
        attempt.path.mkdir(parents=True, exist_ok=True)
        folders = (str(self.site),)
        CodeRecord(packages=read_versions(folders), imported=("timm",), site_folders=folders).write(attempt.code)


@pytest.mark.parametrize("overrides", [(), ("cluster.python=/opt/other/bin/python",)])
def test_compared_packages(orch: Type, seeds: Seeds, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    trained = TrainedPackages(seeds, tmp_path, *overrides)
    run, install_here = trained.run, partial(install, trained.site)
    install_here("black", "2.0")
    same = orch("resume", run.name, "--no-controller")
    assert (same.code, "packages" in same.err) == (0, False), "with what trained, and whatever the submit had"
    install_here("timm", "1.0")
    refused = orch("resume", run.name, "--no-controller")
    assert (refused.code, "env.packages: timm 2.0 -> 1.0" in refused.err) == (4, True), refused.err
    assert "env.packages differs from the run's training" in refused.err
    assert orch("resume", run.name, "--accept", "env.packages", "--no-controller").code == 0
    install_here("torch", "2.1")
    assert "env.torch: 2.0 -> 2.1; env.packages: timm 2.0 -> 1.0, torch 2.0 -> 2.1" in orch("resume", run.name).err


def test_snapshot_without_packages(orch: Type, seeds: Seeds, tmp_path: Path) -> None:
    trained = TrainedPackages(seeds, tmp_path, "workload.snapshot=true")
    install(trained.site, "timm", "3.0")
    assert "env.packages: timm 2.0 -> 3.0" in orch("resume", trained.run.name, "--no-controller").err


def test_unreadable_packages(orch: Type, seeds: Seeds, tmp_path: Path) -> None:
    trained = TrainedPackages(seeds, tmp_path)
    trained.site.rename(tmp_path / "elsewhere")
    found = orch("resume", trained.run.name, "--no-controller")
    words = f"packages that {trained.run.name} trained with could not be compared: {trained.site} cannot be read here"
    assert (found.code, words in " ".join(found.err.split())) == (0, True), found.err
