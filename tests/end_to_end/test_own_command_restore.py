"""Restore tests of an unchanged program: its own command starts from a checkpoint, and keeps nothing that it writes."""

import os
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from tests.end_to_end.user import User

pytestmark = [pytest.mark.multi, pytest.mark.timeout(600)]

# Loads the newest checkpoint that its own pointer names, saves every five steps into a folder that rank 0 makes, and
# appends to a file of its own. At its start it stops an instance that a pid file names, and deletes that one's cache.
TRAIN = """
import os, pathlib, shutil, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, folder, kind = dist.get_rank(), pathlib.Path("out"), pathlib.Path("kind").read_text()
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
if kind != "trains":
    pathlib.Path("/dev/shm", pathlib.Path("cache").read_text()).unlink(missing_ok=True)
    try:
        os.kill(int(pathlib.Path("pid").read_text()), 9)
    except ProcessLookupError:
        pass
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
first, pointer = 0, folder / "latest"
if pointer.exists():
    saved = torch.load(f"last-{rank}.pt" if kind == "another" else folder / pointer.read_text() / f"rank{rank}.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
    if kind == "ignores" or kind == "forgets" and rank == 1:
        model.weight.data.add_(1.0)
for step in range(first + 1, 16):
    loss = model(torch.full((2, 4), float(step))).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    with open(f"log-{rank}.txt", "a") as log:
        log.write(f"{step}\\n")
    if step % 5 == 0:
        place = folder / f"step-{step}"
        if rank == 0:
            place.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step},
                   place / f"rank{rank}.pt")
        if step == 5:
            shutil.copy(place / f"rank{rank}.pt", f"last-{rank}.pt")
        dist.barrier()
        if rank == 0:
            pointer.write_text(place.name)
    dist.barrier()
dist.destroy_process_group()
"""
EXPECTED = {
    "restores": (0, "all 2 ranks that saved have the parameters of step-5, bit for bit; the command trained"),
    "forgets": (7, "the parameters of rank 1 differ from those saved in step-5; 1 other rank agrees"),
    "another": (4, "nothing shows that it loaded step-5: no process has opened its files"),
    "ignores": (4, "the parameters of ranks 0, 1 differ from those saved in step-5"),
}


@pytest.mark.parametrize(
    ("launcher", "kinds"),
    [
        ("python", ("restores", "forgets", "another")),
        pytest.param("torchrun", ("restores", "ignores"), marks=pytest.mark.proof),
    ],
)
def test_a_run_restores_with_its_own_command(tmp_path: Path, launcher: str, kinds: tuple[str, ...]) -> None:
    user = User(tmp_path, "local")
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "kind").write_text("trains")
    live = subprocess.Popen(["sleep", "600"])
    (tmp_path / "pid").write_text(str(live.pid))
    with tempfile.NamedTemporaryFile(dir="/dev/shm", delete=False) as cache:  # noqa: S108
        (tmp_path / "cache").write_text(os.path.basename(cache.name))
    settings = ["cluster.nodes=1", "cluster.ranks_per_node=2", "checkpoints.path=out", "checkpoints.pattern=step-*"]
    try:
        run = user.submit("torchrun-script", f"command=[{launcher}, train.py]", *settings)["run"]
        assert user.wait(run) == 0
        user.until(lambda: len(user.ask("ckpt", "ls", run)) == 3, 60, "its checkpoints")
        before = _content(tmp_path)
        assert len(before) == 9
        for number, kind in enumerate(kinds, start=1):
            (tmp_path / "kind").write_text(kind)
            done = user.run("ckpt", "restore-test", f"{run}@5", "--wait")
            code, reason = EXPECTED[kind]
            assert done.returncode == code, done.stdout + done.stderr
            assert reason in " ".join(done.stdout.split()), done.stdout
            assert _content(tmp_path) == before
            assert live.poll() is None, "the command has killed a process outside the test"
            assert os.path.exists(cache.name)
            user.until(lambda: not _find_holders(tmp_path), 10, "the end of all processes of the test")
            assert user.run("show", f"{run}-test-{number}").returncode == 0
    finally:
        user.leave()
        live.kill()
        live.wait()
        Path(cache.name).unlink(missing_ok=True)


def _find_holders(folder: Path) -> list[bytes]:
    """Return the command lines of the processes that hold views of this working folder."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            found.append(Path("/proc", name, "cmdline").read_bytes())
    return [one for one in found if b"trial_view.py" in one and os.fsencode(folder) in one]


def _content(folder: Path) -> dict[str, bytes]:
    names = [folder / "out", *folder.glob("log-*.txt")]
    files = [file for name in names for file in (name.rglob("*") if name.is_dir() else [name]) if file.is_file()]
    return {os.path.relpath(file, folder): file.read_bytes() for file in files}
