"""`orch resume` where code or packages are not as they were when the run trained last."""

import subprocess
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.states import RunState
from tests.installed_distributions import install
from tests.orchestrator.cli.conftest import Seeds, Type
from tests.orchestrator.cli.runs.test_resume_changes import Resumable
from trainer.protocol.run_dir import RunDir
from trainer.protocol.user_code.code_record import CodeFile, CodeRecord
from trainer.protocol.user_code.installed_packages import read_versions


class Repository:
    """A workload of two modules under git, one of them ignored, whose run has trained."""

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


def test_a_commit_a_log_and_a_database_beside_the_code_are_no_other_code(
    orch: Type, seeds: Seeds, service: SimpleNamespace, tmp_path: Path
) -> None:
    code = Repository(seeds, tmp_path)
    for name in ("README.md", "out.log", "runs.db"):
        (code.folder / name).write_text("grows")
    code.commit("add", "README.md")
    code.commit("commit", "-qm", "words")
    (code.folder / "out.log").write_text("grows further")
    assert orch("resume", code.run.name, "--no-controller").code == 0


def test_a_change_in_a_file_that_git_ignores_is_other_code(
    orch: Type, seeds: Seeds, service: SimpleNamespace, tmp_path: Path
) -> None:
    code = Repository(seeds, tmp_path)
    (code.folder / "hidden_part.py").write_text("width = 2\n")
    refused = orch("resume", code.run.name, "--no-controller")
    assert (refused.code, "code.user: hidden_part changed" in refused.err) == (4, True), refused.err
    assert orch("resume", code.run.name, "--accept", "code.user", "--no-controller").code == 0


def test_resume_compares_with_the_code_that_trained_last(
    orch: Type, seeds: Seeds, service: SimpleNamespace, tmp_path: Path
) -> None:
    """The code was edited before the job began: that code trained, and to go on with it needs no word."""
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


def test_a_module_that_is_gone_is_to_be_put_back(
    orch: Type, seeds: Seeds, service: SimpleNamespace, tmp_path: Path
) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    module = folder / "my_model.py"
    module.write_text("class Mine: ...\n")
    run = Resumable(seeds, tmp_path, RunState.HELD, f"workload.path=[{folder}]", "workload.target=my_model:Mine")
    module.rename(folder / "my_model2.py")
    refused = orch("resume", run.name, "optimizer.lr=0.5")
    assert (refused.code, "put the file back" in refused.err, "my_model2" in refused.err) == (2, True, False)


class TrainedPackages:
    """A run whose attempt recorded that it trained with timm 2.0, in the folder of another interpreter."""

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
def test_packages_are_compared_with_those_that_trained_whatever_interpreter_had_them(
    orch: Type, seeds: Seeds, service: SimpleNamespace, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    trained = TrainedPackages(seeds, tmp_path, *overrides)
    run, install_here = trained.run, partial(install, trained.site)
    install_here("black", "2.0")
    same = orch("resume", run.name, "--no-controller")
    assert (same.code, "packages" in same.err) == (0, False), "with what trained, and whatever the submit had"
    install_here("timm", "1.0")
    refused = orch("resume", run.name, "--no-controller")
    assert (refused.code, "env.packages: timm 2.0 -> 1.0" in refused.err) == (4, True), refused.err
    assert "env.packages differs from what the run was trained with" in refused.err
    assert orch("resume", run.name, "--accept", "env.packages", "--no-controller").code == 0
    install_here("torch", "2.1")
    assert "env.torch: 2.0 -> 2.1; env.packages: timm 2.0 -> 1.0, torch 2.0 -> 2.1" in orch("resume", run.name).err


def test_a_copy_of_the_code_does_not_hold_the_packages(
    orch: Type, seeds: Seeds, service: SimpleNamespace, tmp_path: Path
) -> None:
    trained = TrainedPackages(seeds, tmp_path, "workload.snapshot=true")
    install(trained.site, "timm", "3.0")
    assert "env.packages: timm 2.0 -> 3.0" in orch("resume", trained.run.name, "--no-controller").err


def test_packages_that_cannot_be_seen_are_named_and_refuse_nothing(
    orch: Type, seeds: Seeds, service: SimpleNamespace, tmp_path: Path
) -> None:
    trained = TrainedPackages(seeds, tmp_path)
    trained.site.rename(tmp_path / "elsewhere")
    found = orch("resume", trained.run.name, "--no-controller")
    words = f"packages that {trained.run.name} trained with could not be compared: {trained.site} cannot be read here"
    assert (found.code, words in " ".join(found.err.split())) == (0, True), found.err
