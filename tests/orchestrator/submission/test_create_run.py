"""`orch submit` before the controller: all checks come first, and a kill in between is repaired."""

import multiprocessing
import os
import shutil
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest

from checkpointing.storage.durable import read_json
from orchestrator import failpoints
from orchestrator.config.compose import Composed, compose
from orchestrator.config.run_config import RunConfig
from orchestrator.controller.reconcile import Controller
from orchestrator.errors import ConfigError, Precondition
from orchestrator.registry.records import NewRun
from orchestrator.registry.run_record import RunRecord
from orchestrator.registry.store import Store
from orchestrator.run_dirs.run_folder import ensure_run_dir
from orchestrator.states import AttemptState, RunState
from orchestrator.submission import create_run, user_code
from tests.orchestrator.ordinary_user import folder_of_an_ordinary_user
from trainer.protocol.config import WorkloadConfig, load
from trainer.protocol.run_dir import RunDir

DATA = f".data-{os.geteuid()}"

WORKLOAD = """\
from trainer.worker.workload import BaseWorkload
class MyWorkload(BaseWorkload):
    def build_model(self): ...
    def loss(self, model, batch): ...
"""


def composed(tmp_path: Path, *overrides: str) -> Composed:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be " * 100)
    own = (f"cluster.root={tmp_path / 'runs'}", "cluster.kind=local", f"data.text=[{text}]", "train.seq_len=16")
    return compose("tiny-gpt", (*own, *overrides), environ={"HOME": str(tmp_path)})


def submit(tmp_path: Path, store: Store, *overrides: str, **given: Any) -> tuple[Any, Any]:
    known: dict[str, Any] = {"cluster": None, "now": 5.0, **given}
    return create_run.create_run(store, composed(tmp_path, *overrides), **known)


def nothing_was_written(tmp_path: Path, store: Store) -> bool:
    return store.runs() == [] and not [path for path in (tmp_path / "runs").glob("*") if path.name != DATA]


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with Store.open(tmp_path / "registry.db") as opened:
        yield opened


def test_a_submitted_run_is_written_down_whole(tmp_path: Path, store: Store) -> None:
    told: list[tuple[int, int]] = []
    run, attempt = submit(tmp_path, store, "name=mine", progress=lambda done, total: told.append((done, total)))
    assert (run.name, run.state, attempt.state) == ("mine-1", RunState.CREATED, AttemptState.INTENT)
    folder = RunDir(Path(run.run_dir))
    assert folder.path == tmp_path / "runs" / "mine-1"
    assert os.stat(folder.path).st_mode & 0o777 == 0o700
    assert told
    assert told[-1][0] == told[-1][1]
    assert RunRecord.read(folder.record).attempts == (attempt,)
    config = load(folder, 1)
    assert Path(config.data.path).parent == tmp_path / "runs" / DATA
    assert store.config(run.config_digest)["data"]["path"] == config.data.path
    noted = read_json(folder.run)
    assert noted["nonce"] == attempt.nonce
    assert noted["identity"]["data"]["fingerprint"].startswith(Path(config.data.path).name)
    assert noted["identity"]["env"]["torch"]
    assert read_json(folder.attempt(1).path / "intent.json")["job_name"] == attempt.job_name


def test_the_same_text_is_prepared_into_the_same_folder(tmp_path: Path, store: Store) -> None:
    first, _ = submit(tmp_path, store)
    second, _ = submit(tmp_path, store)
    assert first.config_digest == second.config_digest
    assert len(list((tmp_path / "runs" / DATA).iterdir())) == 1


def prepare(root: Path) -> Path:
    """Return the folder of the tokens of `data.text` below a root that several users share."""
    root.chmod(0o1777)
    made = composed(root)
    create_run.prepare_data(made.config, made.data, root)
    return Path(made.data["data"]["path"])


def test_the_tokens_of_another_user_are_left_to_them() -> None:
    with folder_of_an_ordinary_user() as root:
        (root / ".data").mkdir(mode=0o555)
        assert prepare(root).parent == root / f".data-{os.geteuid()}"


def test_a_folder_that_others_may_change_gets_no_tokens() -> None:
    with folder_of_an_ordinary_user() as root:
        place = root / f".data-{os.geteuid()}"
        place.mkdir()
        place.chmod(0o777)
        with pytest.raises(Precondition, match="the tokens of data.text: .* can be changed by everybody"):
            prepare(root)
        place.chmod(0o500)
        with pytest.raises(Precondition, match="cannot be written: Permission denied") as refused:
            prepare(root)
        assert refused.value.hint.startswith(f"`chmod u+rwX {place}`")


def test_a_kill_between_row_and_folder_is_made_good(tmp_path: Path, store: Store, monkeypatch: Any) -> None:
    class Killed(BaseException):
        pass

    def die(point: str) -> None:
        if point == "after_create":
            raise Killed

    monkeypatch.setattr(failpoints, "reach", die)
    with pytest.raises(Killed):
        submit(tmp_path, store)
    run = store.runs()[0]
    assert not Path(run.run_dir).exists()
    folder = ensure_run_dir(run, store.attempts(run.name)[0], store.config(run.config_digest))
    assert load(folder, 1).train.seq_len == 16
    again = ensure_run_dir(run, store.attempts(run.name)[0], store.config(run.config_digest))
    assert again == folder
    assert [path.name for path in folder.path.parent.iterdir() if path.name.endswith(".tmp")] == []


def _make(barrier: Any, answers: Any, runs: list[Any]) -> None:
    for run, attempt, config in runs:
        barrier.wait(60.0)
        try:
            ensure_run_dir(run, attempt, config)
            answers.put("made")
        except Precondition as error:
            answers.put(error.what)


def test_the_submitter_and_a_controller_may_make_the_folder_at_once(tmp_path: Path, store: Store) -> None:
    config = {"name": "both", "train": {"steps": 1}}
    digest, count = store.put_config(config), 30
    (tmp_path / "runs").mkdir()
    runs = []
    for number in range(count):
        run, attempt = store.create_run(
            NewRun(
                slug="both", cluster="local", root=tmp_path / "runs", config_digest=digest, total_steps=1, identity={}
            ),
            now=1.0,
            nonce=f"{number:08x}",
        )
        runs.append((run, attempt, config))
    fork = multiprocessing.get_context("fork")
    barrier, answers = fork.Barrier(2), fork.SimpleQueue()
    makers = [fork.Process(target=_make, args=(barrier, answers, runs)) for _ in range(2)]
    for maker in makers:
        maker.start()
    told = [answers.get() for _ in range(2 * count)]
    for maker in makers:
        maker.join(60.0)
    assert told == ["made"] * (2 * count)
    for run, attempt, _ in runs:
        folder = RunDir(Path(run.run_dir))
        assert read_json(folder.config) == config
        assert read_json(folder.run)["nonce"] == attempt.nonce
        assert (folder.attempt(1).path / "intent.json").exists()


def test_unwritable_root(tmp_path: Path, store: Store) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Precondition) as refused:
        submit(tmp_path, store, f"cluster.root={tmp_path / 'file' / 'runs'}")
    assert refused.value.what.startswith("the folder for runs is not writable")
    assert str(tmp_path / "file" / "runs") in refused.value.where
    assert store.runs() == []


def test_a_run_that_was_refused_is_named_and_never_launched_later(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent:
        kind = "local"
        submitted: ClassVar[list[Any]] = []

        def submit(self, spec: Any) -> None:
            self.submitted.append(spec)

        def find(self, prefix: str, known: Any = ()) -> list[Any]:
            return []

    def full(*args: Any) -> None:
        raise Precondition("cannot create the run's folder: No space left on device", hint="make room")

    with monkeypatch.context() as patch:
        patch.setattr(create_run, "ensure_run_dir", full)
        with pytest.raises(Precondition, match="No space left") as refused:
            submit(tmp_path, store)
    (run,) = store.runs()
    assert refused.value.hint == f"make room; then submit again ({run.name} will not be launched)"
    lease = store.take_lease("me", 6.0, 60.0)
    assert lease is not None
    Controller(store, {"local": Silent()}).tick(lease)  # type: ignore[dict-item]
    assert store.run(run.name).state is RunState.CANCELLED
    assert Silent.submitted == []
    assert store.user_requests() == []


def test_missing_slurm_is_reported_at_once(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Precondition, match="there is no Slurm on this machine"):
        submit(tmp_path, store, cluster="slurm")
    assert nothing_was_written(tmp_path, store)


def test_data_that_is_missing_or_too_small(tmp_path: Path, store: Store) -> None:
    with pytest.raises(ConfigError, match="no such file or folder"):
        submit(tmp_path, store, f"data.text=[{tmp_path / 'nowhere'}]")
    with pytest.raises(ConfigError, match=r"data\.path: .*has no tokens"):
        submit(tmp_path, store, "data.text=[]", f"data.path={tmp_path}")
    with pytest.raises(ConfigError, match="only"):
        submit(tmp_path, store, "train.seq_len=100000")
    assert nothing_was_written(tmp_path, store)


def own(tmp_path: Path, name: str, text: str = WORKLOAD) -> tuple[str, ...]:
    folder = tmp_path / "mine"
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return (f"workload.path=[{folder}]",)


def test_a_module_named_like_one_of_ours_is_refused_with_what_to_do(tmp_path: Path, store: Store) -> None:
    path = own(tmp_path, "trainer.py")
    with pytest.raises(ConfigError, match="the name of one of orch's own packages") as refused:
        submit(tmp_path, store, *path, "workload.target=trainer:MyWorkload")
    assert "my_trainer.py" in refused.value.hint
    own(tmp_path, "checkpointing/__init__.py")
    (tmp_path / "mine" / "trainer.py").unlink()
    with pytest.raises(ConfigError, match="checkpointing"):
        submit(tmp_path, store, *path, "workload.target=checkpointing:MyWorkload")
    assert nothing_was_written(tmp_path, store)


def test_a_workload_is_looked_for_before_512_nodes_do(tmp_path: Path, store: Store) -> None:
    path = own(tmp_path, "pkg/model.py")
    with pytest.raises(ConfigError, match="no module pkg.modle"):
        submit(tmp_path, store, *path, "workload.target=pkg.modle:MyWorkload")
    with pytest.raises(ConfigError, match="no MyWorklod in") as refused:
        submit(tmp_path, store, *path, "workload.target=pkg.model:MyWorklod")
    assert refused.value.hint == "did you mean pkg.model:MyWorkload?"
    own(tmp_path, "broken.py", "def (")
    with pytest.raises(ConfigError, match=r"broken.py is not valid Python here: invalid syntax$") as refused:
        submit(tmp_path, store, *path, "workload.target=broken:MyWorkload")
    assert refused.value.where.endswith("broken.py:1")
    run, _ = submit(tmp_path, store, *path, "workload.target=pkg.model:MyWorkload")
    assert run.name == "tiny-gpt-1"


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("class X: pass", True),
        ("class X(object):\n  def build_model(self): ...", True),
        ("class X:\n  def __init__(self, config): ...\n  def loss(self): ...", True),
        ("class X:\n  def __init__(self, config): ...\n  def build_model(self): ...", False),
        ("from a import Base\nclass X(Base): pass", False),
        ("from a import decorate\n@decorate\nclass X: pass", False),
        ("from a import decorate\nclass X: pass\nX = decorate(X)", False),
    ],
)
def test_a_class_that_cannot_be_a_workload_is_refused(tmp_path: Path, text: str, refused: bool) -> None:
    code = own(tmp_path, "mine.py", text)[0].partition("[")[2].rstrip("]")
    config = RunConfig(workload=WorkloadConfig(target="mine:X", path=(code,)))
    with pytest.raises(ConfigError, match="mine:X: X is not a BaseWorkload") if refused else nullcontext() as told:
        user_code.check(config)
    if refused:
        assert told.value.hint.endswith("class X(orch.BaseWorkload): ...")
        assert told.value.where.endswith("mine.py:1")


SNAPSHOT = ("workload.target=pkg.model:MyWorkload", "workload.snapshot=true")


def test_a_snapshot_omits_pipes_and_sockets(tmp_path: Path, store: Store) -> None:
    path = own(tmp_path, "pkg/model.py")
    os.mkfifo(tmp_path / "mine" / "pipe")
    (tmp_path / "mine" / "link").symlink_to("nowhere")
    here = os.getcwd()
    with socket.socket(socket.AF_UNIX) as listening:
        os.chdir(tmp_path / "mine")  # the path of a socket is short
        listening.bind("socket")
        os.chdir(here)
    run, _ = submit(tmp_path, store, *path, *SNAPSHOT)
    copied = RunDir(Path(run.run_dir)).code / "0"
    assert {item.name for item in copied.iterdir()} == {"pkg", "link"}


@pytest.mark.parametrize("name", ["secret.txt", "folder"])
def test_unreadable_files_prevent_a_snapshot_and_a_run(
    tmp_path: Path, store: Store, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = own(tmp_path, "pkg/model.py")
    unread = tmp_path / "mine" / name
    unread.mkdir() if name == "folder" else unread.write_text("x")
    real = os.access  # root may read everything
    monkeypatch.setattr(os, "access", lambda path, *words, **more: Path(path) != unread and real(path, *words, **more))
    with pytest.raises(Precondition, match=f"workload.snapshot: {unread} cannot be read or copied") as refused:
        submit(tmp_path, store, *path, *SNAPSHOT)
    assert refused.value.hint.startswith(f"`chmod u+rX {unread}`")
    assert nothing_was_written(tmp_path, store)
    unread.rmdir() if name == "folder" else unread.unlink()
    submit(tmp_path, store, *path, *SNAPSHOT)


def test_files_that_became_unreadable_after_the_check_are_named(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = own(tmp_path, "pkg/model.py")
    unread = str(tmp_path / "mine" / "pkg" / "model.py")

    def fail(*_: Any, **__: Any) -> None:
        raise shutil.Error([(unread, "/there", "[Errno 13] Permission denied")])

    monkeypatch.setattr(create_run, "check_readable_code", lambda folders: None)
    monkeypatch.setattr(shutil, "copytree", fail)
    monkeypatch.setattr(os, "access", lambda path, *words, **more: str(path) != unread)
    with pytest.raises(Precondition, match="workload.snapshot: .*model.py cannot be read"):
        submit(tmp_path, store, *path, *SNAPSHOT)


def test_a_snapshot_keeps_the_code_as_it_was(tmp_path: Path, store: Store) -> None:
    path = own(tmp_path, "pkg/model.py")
    run, _ = submit(tmp_path, store, *path, "workload.target=pkg.model:MyWorkload", "workload.snapshot=true")
    (tmp_path / "mine" / "pkg" / "model.py").write_text("changed")
    assert (RunDir(Path(run.run_dir)).code / "0" / "pkg" / "model.py").read_text() == WORKLOAD


@pytest.mark.parametrize("key", ["cluster.root={}", "checkpoint.tiers=[{{path: run}}, {{path: {}}}]"])
def test_a_place_inside_another_run_s_folder_is_refused_for_rm_would_delete_it(
    tmp_path: Path, store: Store, key: str
) -> None:
    outer = Path(submit(tmp_path, store, "name=base")[0].run_dir)
    with pytest.raises(ConfigError, match="is inside the folder of the run base-1") as refused:
        submit(tmp_path, store, "name=fine", key.format(outer / "finetune"))
    assert refused.value.where == key.partition("=")[0]
    assert not (outer / "finetune").exists()
    assert [run.name for run in store.runs()] == ["base-1"]


def test_a_tier_with_another_users_run_is_refused(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scratch" / "mine-1").mkdir(parents=True)
    tiers = f"checkpoint.tiers=[{{path: {tmp_path / 'scratch'}}}, {{path: run}}]"
    user = os.geteuid()
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: user + 1)
        with pytest.raises(ConfigError, match="mine-1 already exists and belongs to "):
            submit(tmp_path, store, "name=mine", "cluster.shared_root=true", tiers)
    assert nothing_was_written(tmp_path, store)
    assert submit(tmp_path, store, "name=mine", tiers)[0].name == "mine-1"
