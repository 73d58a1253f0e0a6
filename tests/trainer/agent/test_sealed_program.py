"""A program under real agents whose newest checkpoint is damaged: it starts from the older, verified one."""

import json
import sys
from pathlib import Path

import pytest

from trainer.protocol.events import EventKind

pytestmark = pytest.mark.multi

PROGRAM = """
import json, os, pathlib, sys, time, zipfile
out, seals = pathlib.Path(sys.argv[1]), pathlib.Path(os.environ["ORCH_RUN_DIR"], "seals")
out.mkdir(exist_ok=True)
found = sorted(path.name for path in out.iterdir())
with open("starts.jsonl", "a") as file:
    file.write(json.dumps([found, os.environ.get("ORCH_RESUME_PATH", "")]) + "\\n")
if os.environ["ORCH_GENERATION"] == "1":
    for step in (10, 20):
        with zipfile.ZipFile(out / f"step_{step}.pt", "w") as archive:
            archive.writestr("data", b"%d" % step * 10000)
    sys.exit(3)
if os.environ["ORCH_GENERATION"] == "2":
    while not all((seals / f"step_{step}.pt.json").exists() for step in (10, 20)):
        time.sleep(0.02)
    with open(out / "step_20.pt", "r+b") as file:
        file.seek(5000)
        file.write(b"x")
    sys.exit(3)
"""


def test_a_damaged_checkpoint_is_refused_before_the_program_starts_again(job, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    out = tmp_path / "out"
    command = [sys.executable, str(tmp_path / "train.py"), str(out)]
    checkpoints = {"path": str(out), "pattern": "step_*.pt"}
    work = job(
        nodes=1, ranks=1, command=command, checkpoints=checkpoints, env={"ORCH_SUBMIT_DIR": str(tmp_path)},
        recovery={"backoff": 0.1},
    ).ends(0)  # fmt: skip
    starts = [json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    assert starts == [
        [[], ""],
        [["step_10.pt", "step_20.pt"], str(out / "step_20.pt")],
        [["step_10.pt"], str(out / "step_10.pt")],
    ]
    assert {event.data["step"] for event in work.events(EventKind.CHECKPOINT_SEALED)} == {10, 20}
    (aside,) = work.events(EventKind.CHECKPOINT_SET_ASIDE)
    assert aside.data["reason"] == (
        "it does not match its seal: step_20.pt has other bytes than when it was sealed"
    )  # fmt: skip
    assert Path(aside.data["path"]).is_file()
