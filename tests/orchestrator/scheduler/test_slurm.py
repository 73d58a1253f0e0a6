"""The Slurm scheduler on commands that answer, fail, hang and talk nonsense."""

import os
import shlex
import shutil
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.errors import ConfigError, Precondition, SlurmUnreachable, SubmitAmbiguous, SubmitRejected
from orchestrator.scheduler.available_schedulers import resolve, usable
from orchestrator.scheduler.interface import UNREADABLE, UNRECORDED, JobSpec, Resources
from orchestrator.scheduler.job_environment import Submitter
from orchestrator.scheduler.script import adopt_payload, find_job_ids
from orchestrator.scheduler.slurm.command_output import OUTPUT_FIELDS, SEARCH_FIELDS, SEPARATOR, SQUEUE_FIELDS
from orchestrator.scheduler.slurm.slurm_scheduler import SlurmScheduler
from tests.orchestrator.scheduler.conftest import Program, printing
from tests.orchestrator.scheduler.test_slurm_text import QUEUE, accounting

NO_FILES = ["--output=/dev/null", "--error=/dev/null"]
DISABLED = "echo 'Slurm accounting storage is disabled' >&2; exit 1"
DBD_AWAY = "echo 'sacct: error: Problem talking to the database: Connection refused' >&2; exit 1"


def squeue(folder: Path, *rows: dict[str, str], cut: int = 0) -> str:
    """Return the body of a squeue that lists these jobs, or only those of `-j`, in each of our formats.

    `cut`: number of characters that the answer lacks.
    """
    formats = {"search": SEARCH_FIELDS, "full": SQUEUE_FIELDS, "outputs": OUTPUT_FIELDS}
    for kind, fields in formats.items():
        for row in rows:
            known = {"ArrayTask": "N/A", **QUEUE, **row}
            padded = [known[name] if kind == "search" else f"{known[name]:<{width}}" for name, width in fields]
            text = "".join(f"{value}{SEPARATOR}" for value in padded) + "\n"
            (folder / f"{kind}.{known['JobID']}").write_text(text[: len(text) - cut] if row is rows[-1] else text)
    return f"""echo "$*" >> {folder}/asked
case "$*" in *%A*) kind=search ;; *NodeList*) kind=full ;; *) kind=outputs ;; esac
ids=; for word; do [ "$before" = -j ] && ids=$word; before=$word; done
for file in {folder}/$kind.*; do
  case ",${{ids:-${{file##*.}}}}," in *,${{file##*.}},*) cat $file ;; esac
done"""


def test_accounting_answers_for_what_the_queue_has_forgotten(program: Program, tmp_path: Path) -> None:
    program("squeue", "true")
    program("sacct", printing(tmp_path, "rows", accounting(JobIDRaw="7", State="TIMEOUT") + accounting(JobIDRaw="8")))
    program("sinfo", "echo 'n1 idle'")
    assert {job: status.state for job, status in SlurmScheduler().poll(["7"]).items()} == {"7": "TIMEOUT"}


def test_accounting_rows_count_despite_an_error(program: Program, tmp_path: Path) -> None:
    rows = printing(tmp_path, "rows", accounting(JobIDRaw="7", State="TIMEOUT"))
    program("squeue", "true")
    program("sinfo", "echo 'n1 idle'")
    program("sacct", f"echo 'sacct: error: cannot find accounting plugin' >&2; {rows}")
    assert SlurmScheduler().poll(["7"])["7"].state == "TIMEOUT"
    program("sacct", "echo 'sacct: error: cannot find accounting plugin' >&2")
    assert SlurmScheduler().poll(["7"])["7"].state == UNRECORDED


def test_the_queue_is_asked_first_and_believed(program: Program, tmp_path: Path) -> None:
    program("squeue", squeue(tmp_path, {"JobID": "7"}))
    program("sacct", printing(tmp_path, "rows", accounting(JobIDRaw="7", State="NODE_FAIL")))
    assert SlurmScheduler().poll(["7"])["7"].state == "RUNNING"
    assert [job.state for job in SlurmScheduler().find("orch-")] == ["RUNNING"]


def test_a_reused_id_is_distinguished_by_its_submit_time(program: Program, tmp_path: Path) -> None:
    program("squeue", squeue(tmp_path, {"JobID": "7", "SubmitTime": "2026-11-21T05:00:00", "Name": "orch-a-2-ee"}))
    program("sacct", printing(tmp_path, "rows", accounting(JobIDRaw="7")))
    assert [(job.job_id, job.name) for job in SlurmScheduler().find("orch-a-")] == [("7", "orch-a-2-ee")]
    assert SlurmScheduler().poll(["7"])["7"].name == "orch-a-2-ee"
    program("squeue", "true")
    program("sinfo", "true")
    rows = accounting(JobIDRaw="7") + accounting(JobIDRaw="7", JobName="eval", Submit="2026-11-21T05:00:00")
    program("sacct", printing(tmp_path, "rows", rows))
    assert SlurmScheduler().poll(["7"])["7"].name == "eval"


def test_the_newest_submission_of_several_rows_counts(program: Program, tmp_path: Path) -> None:
    program("squeue", "true")
    rows = accounting(JobIDRaw="7", State="COMPLETED", Submit="2026-11-21T09:00:00") + accounting(JobIDRaw="7")
    program("sacct", printing(tmp_path, "rows", rows))
    program("sinfo", "echo 'n1 idle'")
    assert SlurmScheduler().poll(["7"])["7"].state == "COMPLETED"


def test_known_jobs_are_asked_for_by_id_in_one_call(program: Program, tmp_path: Path) -> None:
    program("squeue", squeue(tmp_path, {"JobID": "7"}, {"JobID": "8", "Name": "site-8"}, {"JobID": "9"}))
    program("sacct", f"touch {tmp_path / 'sacct'}")
    found = SlurmScheduler().poll(["7", "8"])
    assert {job_id: job.name for job_id, job in found.items()} == {"7": "orch-a-1-abcd1234", "8": "site-8"}
    (call,) = (tmp_path / "asked").read_text().splitlines()
    assert "-t all -j 7,8 -O " in call
    assert not (tmp_path / "sacct").exists(), "no job has left the queue"


def test_an_id_unknown_to_slurm_is_missing(program: Program) -> None:
    program("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    program("sacct", DISABLED)
    assert SlurmScheduler().poll(["8"]) == {}


def test_a_search_asks_for_long_rows_of_orchs_jobs_only(program: Program, tmp_path: Path) -> None:
    bare = {"Name": "site", "Comment": "", "Command": "/s", "STDOUT": "/o"}
    tasks = [{**bare, "JobID": str(number), "ArrayTask": str(number)} for number in range(10, 30)]
    program("squeue", squeue(tmp_path, {"JobID": "7"}, {**bare, "JobID": "8"}, *tasks))
    assert [job.job_id for job in SlurmScheduler().find("orch-")] == ["7"]
    assert [job.nodes for job in SlurmScheduler().find("orch-")] == [("n1", "n2")]
    calls = (tmp_path / "asked").read_text().splitlines()[:3]
    assert ["NodeList" in call for call in calls] == [False, False, True]
    assert [" -j 8 " in call for call in calls] == [False, True, False], "an array task is never orch's"
    assert " -j 7 " in calls[2]


def test_jobs_missing_from_a_cut_answer_are_unknown(program: Program, tmp_path: Path) -> None:
    program("squeue", squeue(tmp_path, {"JobID": "7"}, {"JobID": "8"}, cut=60))
    program("sacct", DISABLED)
    found = SlurmScheduler().poll(["7", "8"])
    assert {job_id: job.state for job_id, job in found.items()} == {"7": "RUNNING", "8": UNREADABLE}
    with pytest.raises(SlurmUnreachable, match="truncated"):
        SlurmScheduler().find("orch-")


def test_a_renamed_job_is_found_by_its_comment_its_files_and_its_id(program: Program, tmp_path: Path) -> None:
    bare = {"Name": "site", "Comment": "", "Command": "/s", "STDOUT": "/o"}
    rows = (
        {**bare, "JobID": "1", "Comment": "orch:a/1/abcd1234"},
        {**bare, "JobID": "2", "Command": "/runs/a/attempts/001/submission/submission_file_0.sh"},
        {**bare, "JobID": "3", "STDOUT": "/runs/a/attempts/001/submission/%j_0_log.out"},
        {**bare, "JobID": "4"},
        {**bare, "JobID": "5", "Comment": "x" * 512},
    )
    program("squeue", squeue(tmp_path, *rows))
    program("sacct", DISABLED)
    assert [job.job_id for job in SlurmScheduler().find("orch-", {"4"})] == ["1", "2", "3", "4"]
    assert [job.job_id for job in SlurmScheduler().find("orch-a-1-abcd1234")] == ["1", "2", "3"]
    assert SlurmScheduler().find("orch-b-") == []


@pytest.mark.parametrize(
    ("script", "tag"),
    [
        ("echo '#!/bin/bash'; echo 'export ORCH_JOB=orch-a-1-abcd1234'; echo 'srun x'", "orch-a-1-abcd1234"),
        ("echo '#!/bin/bash'; echo 'python eval.py'", ""),
        ("exit 1", None),
    ],
)
def test_an_untagged_job_is_identified_by_its_script(
    program: Program, tmp_path: Path, script: str, tag: str | None
) -> None:
    bare = {"JobID": "4", "Name": "site", "Comment": "", "Command": "/s", "STDOUT": "/o"}
    program("squeue", squeue(tmp_path, bare))
    program("sacct", DISABLED)
    program("scontrol", f'test "$*" = "write batch_script 4 -" && {{ {script}; }}')
    assert [job.script_tag for job in SlurmScheduler().find("orch-", {"4"})] == [tag]


def test_a_submission_tells_the_id_and_the_job_its_name(program: Program, tmp_path: Path) -> None:
    program("sbatch", "echo Submitted batch job 5 on cluster x")
    assert SlurmScheduler(entry="os:getpid").submit(spec(tmp_path)) == "5"
    script = (tmp_path / "submission" / "5_submission.sh").read_text()
    assert "export ORCH_JOB=orch-a-1-abcd1234" in script
    assert find_job_ids(tmp_path / "submission") == {"5"}
    assert find_job_ids(tmp_path / "nowhere") == set()


def test_a_site_without_accounting_has_a_queue_that_decides(program: Program, tmp_path: Path) -> None:
    program("squeue", squeue(tmp_path, {"JobID": "7"}))
    program("sacct", DISABLED)
    assert set(SlurmScheduler().poll(["7", "8"])) == {"7"}
    assert SlurmScheduler().find("orch-nobody") == []


@pytest.mark.parametrize("sacct", [DBD_AWAY, "echo 'sacct: error: slurmdbd: gone' >&2", "echo nonsense", "exit 3"])
def test_a_silent_accounting_leaves_what_the_queue_does_not_know_unknown(
    program: Program, tmp_path: Path, sacct: str
) -> None:
    program("squeue", squeue(tmp_path, {"JobID": "7"}))
    program("sacct", f"echo asked >> {tmp_path / 'of_sacct'}; {sacct}")
    scheduler = SlurmScheduler()
    assert set(scheduler.poll(["7"])) == {"7"}
    assert len(scheduler.find("orch-a-1")) == 1
    assert scheduler.find("orch-nobody") == []
    assert not (tmp_path / "of_sacct").exists()
    both = scheduler.poll(["7", "8"])
    assert (both["7"].state, both["8"].state) == ("RUNNING", UNRECORDED)
    assert "sacct got no usable answer" in both["8"].reason
    # One that takes long to fail is not asked in every pass.
    assert scheduler.poll(["8"])["8"].state == UNRECORDED
    assert (tmp_path / "of_sacct").read_text() == "asked\n"


@pytest.mark.parametrize("sacct", [DBD_AWAY, "exec sleep 60"])
def test_a_release_and_a_cancel_need_no_accounting(program: Program, tmp_path: Path, sacct: str) -> None:
    program("squeue", "true")
    program("sacct", sacct)
    program("scontrol", "exit 1")
    program("scancel", "exit 1")
    (tmp_path / "7_submitted.pkl").touch()
    SlurmScheduler().release("7", tmp_path)
    SlurmScheduler().cancel("7")


@pytest.mark.parametrize(
    "squeue", ["echo nonsense", "exit 1", "echo 'error: Unable to contact slurm controller' >&2; exit 1"]
)
def test_a_silent_queue_is_no_answer(program: Program, tmp_path: Path, squeue: str) -> None:
    program("squeue", squeue)
    program("sacct", printing(tmp_path, "rows", accounting(JobIDRaw="7")))
    with pytest.raises(SlurmUnreachable):
        SlurmScheduler().poll(["7"])
    with pytest.raises(SlurmUnreachable):
        SlurmScheduler().find("orch-")


def test_a_hanging_command_is_given_up(program: Program) -> None:
    program("squeue", "exec sleep 60")
    before = time.monotonic()
    with pytest.raises(SlurmUnreachable, match="no answer within 0 s"):
        SlurmScheduler(timeout=0.2).poll(["7"])
    assert time.monotonic() - before < 10


def test_look_ups_ignore_what_the_shell_adds(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_USERS", "somebody")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    program("squeue", f'echo "$TZ $SQUEUE_USERS." > {tmp_path / "seen"}')
    program("sacct", DISABLED)
    SlurmScheduler().poll(["7"])
    assert (tmp_path / "seen").read_text() == "UTC .\n"


def spec(folder: Path) -> JobSpec:
    return JobSpec(
        name="orch-a-1-abcd1234", comment="orch:a/1", run_dir=folder, attempt=1, submission=folder / "submission",
        resources=Resources(nodes=1),
    )  # fmt: skip


SEES_SCRIPT = """
for word; do script=$word; done
mv {0}/run {0}/aside; mkdir -p {0}/run/submission; echo Bob > {0}/run/submission/$(basename $script)
cat $script > {0}/submitted
echo Submitted batch job 5
"""
"""An sbatch during which Bob exchanges the run's folder, before it reads the script."""


def test_slurm_uses_no_names_below_a_shared_folder(program: Program, tmp_path: Path) -> None:
    shared, tools = tmp_path / "shared", ("mv", "mkdir", "basename")
    for tool in tools:
        program(tool, f'exec {shutil.which(tool, path=os.defpath)} "$@"')
    shared.mkdir()
    shared.chmod(0o777)
    (shared / "run").mkdir(mode=0o700)
    program("sbatch", SEES_SCRIPT.format(shared))
    assert SlurmScheduler(entry="os:getpid").submit(spec(shared / "run")) == "5"
    script = (shared / "submitted").read_text()
    assert script.startswith("#!/bin/bash"), "not Bob's"
    assert "#SBATCH --output=/dev/null" in script
    assert "#SBATCH --error=/dev/null" in script
    (srun,) = (shlex.split(line) for line in script.splitlines() if line.startswith("srun "))
    assert [word for word in srun if word.startswith(("--output", "--error"))][-2:] == NO_FILES
    assert srun[srun.index("trainer.agent.main") + 1 :] == [f"{shared}/run", f"{shared}/run/submission"]
    assert (shared / "aside/submission/5_submitted.pkl").exists()
    assert not (shared / "run/submission/5_submitted.pkl").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_another_users_folder_is_refused(program: Program, tmp_path: Path) -> None:
    program("sbatch", f"touch {tmp_path / 'asked'}")
    (tmp_path / "run").mkdir()
    os.chown(tmp_path / "run", 61002, -1)
    with pytest.raises(Precondition, match="the run directory is not private: .* belongs to uid 61002"):
        SlurmScheduler(entry="os:getpid").submit(spec(tmp_path / "run"))
    assert not (tmp_path / "asked").exists()


def test_without_sbatch_there_is_a_hint_and_no_trace(program: Program, tmp_path: Path) -> None:
    with pytest.raises(Precondition) as caught:
        SlurmScheduler(entry="os:getpid").submit(spec(tmp_path))
    assert "cluster.kind=local" in caught.value.hint
    assert not (tmp_path / "submission").exists()


@pytest.mark.parametrize(
    "sbatch", ["exit 1", "echo Submitted", "kill -9 $$", "echo 'sbatch: error: Socket timed out' >&2; exit 1"]
)
def test_an_sbatch_that_does_not_say_no_is_ambiguous(program: Program, tmp_path: Path, sbatch: str) -> None:
    program("sbatch", sbatch)
    with pytest.raises(SubmitAmbiguous):
        SlurmScheduler(entry="os:getpid").submit(spec(tmp_path))


def test_a_submission_leaves_stderr_to_the_other_threads(
    program: Program, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    begun, go_on = tmp_path / "begun", tmp_path / "go_on"
    words = "sbatch: error: Batch job submission failed: Access denied"
    program("sbatch", f": > {begun}; read line < {go_on}; echo '{words}' >&2; exit 1")
    os.mkfifo(go_on)
    before, refused = sys.stderr, []

    def submit() -> None:
        with pytest.raises(SubmitRejected) as caught:
            SlurmScheduler(entry="os:getpid").submit(spec(tmp_path))
        refused.append(str(caught.value))

    thread = threading.Thread(target=submit)
    thread.start()
    while thread.is_alive() and not begun.exists():
        time.sleep(0.01)
    during = sys.stderr
    go_on.write_text("\n")
    thread.join()
    assert during is before
    assert ["Access denied" in one for one in refused] == [True]
    assert capfd.readouterr().err == "", "the caller prints the refusal"


def test_sbatch_sees_no_variable_that_overrides_the_script(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "elsewhere")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    program("sbatch", f"env > {tmp_path / 'seen'}; echo Submitted batch job 5")
    SlurmScheduler(entry="os:getpid").submit(spec(tmp_path))
    seen = (tmp_path / "seen").read_text()
    assert "SLURM_CONF=/etc/slurm.conf" in seen
    assert "SBATCH_PARTITION" not in seen
    assert "secret" not in seen


def test_every_attempt_sees_what_the_submitter_saw_and_asks_the_slurm_of_the_controller(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = {
        "LD_LIBRARY_PATH": "/opt/a b/lib",
        "PATH": "/opt/bin:/usr/bin:/bin",
        "SLURM_CONF": "/other",
        "ORCH_KEY": "s3",
    }
    recorded = {"job": {**Submitter.from_environ(theirs).to_json(), "python": "/opt/venv/bin/python"}}
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    monkeypatch.setenv("VIRTUAL_ENV", "/home/ann/another")
    program("sbatch", f"env > {tmp_path / 'seen'}; echo Submitted batch job 5")
    SlurmScheduler(entry="os:getpid").submit(replace(spec(tmp_path), submitter=Submitter.from_identity(recorded)))
    seen = (tmp_path / "seen").read_text().splitlines()
    assert {"LD_LIBRARY_PATH=/opt/a b/lib", "PATH=/opt/bin:/usr/bin:/bin", "SLURM_CONF=/etc/slurm.conf"} <= set(seen)
    assert not [line for line in seen if line.startswith(("VIRTUAL_ENV=", "ORCH_KEY="))]
    assert "/opt/venv/bin/python -P" in (tmp_path / "submission" / "5_submission.sh").read_text()


def test_the_payload_is_adopted_once_from_whatever_is_there(tmp_path: Path) -> None:
    orphan = tmp_path / ("0" * 32 + ".pkl")
    orphan.write_bytes(b"payload")
    for _ in range(2):
        adopt_payload(tmp_path, "7")
    adopt_payload(tmp_path, "8")
    assert [(tmp_path / f"{job}_submitted.pkl").read_bytes() for job in (7, 8)] == [b"payload"] * 2
    orphan.unlink()
    adopt_payload(tmp_path, "9")
    assert (tmp_path / "9_submitted.pkl").exists()


def test_missing_payload(tmp_path: Path) -> None:
    with pytest.raises(Precondition, match="payload of job 7 is missing"):
        adopt_payload(tmp_path, "7")


def test_auto_is_slurm_where_sbatch_is(program: Program) -> None:
    assert (resolve("auto"), *usable("local"), *usable("slurm")) == ("local", "local")
    program("sbatch", "true")
    found = {**usable("slurm"), **usable("local")}
    assert (resolve("auto"), {kind: one.kind for kind, one in found.items()}) == (
        "slurm",
        {"slurm": "slurm", "local": "local"},
    )
    with pytest.raises(ConfigError, match="cluster.kind=pbs"):
        resolve("pbs")


def test_the_agents_entry_travels_by_reference(program: Program, tmp_path: Path) -> None:
    program("sbatch", "echo Submitted batch job 5")
    SlurmScheduler(entry="tests.slurm.payload:record").submit(replace(spec(tmp_path), attempt=3))
    payload = (tmp_path / "submission" / "5_submitted.pkl").read_bytes()
    assert b"tests.slurm.payload" in payload
    assert len(payload) < 600


def test_a_client_that_is_missing_is_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmUnreachable, match="squeue is not on PATH"):
        SlurmScheduler().poll(["7"])
