"""An existing script as ranks: torchrun's environment, its exit codes, its restarts."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from checkpointing.storage.durable import dump_line
from tests.trainer.agent.job import until
from trainer.agent.fork_server.launch_order import with_interpreter
from trainer.protocol.config import JobConfig
from trainer.protocol.events import EventKind
from trainer.protocol.failures.outcome import ExitCode
from trainer.protocol.restore_test import RESTORE_PROGRAM
from trainer.protocol.user_code.code_record import CodeRecord


def test_a_command_finds_torchruns_variables_and_its_folder(job, tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    work = job("exit:3@2@1", cluster={"cpus_per_task": 4}, env={"COLOR": "green", "ORCH_SUBMIT_DIR": str(folder)})
    work.ends(0, 0)
    notes = {(note["generation"], note["rank"]): note for note in work.notes()}
    env = notes[2, 3]["env"]
    wanted = {
        "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
        "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "5", "TORCHELASTIC_RUN_ID": "run-1-1", "TORCHELASTIC_USE_AGENT_STORE": "False",
        "ORCH_RUN": "run-1", "ORCH_ATTEMPT": "1", "ORCH_GENERATION": "2", "ORCH_RUN_DIR": str(work.run.path),
        "COLOR": "green",
    }  # fmt: skip
    assert {name: env[name] for name in wanted} == wanted
    ports = {(generation, note["env"]["MASTER_PORT"]) for (generation, _), note in notes.items()}
    assert len(ports) == 2
    assert {note["cwd"] for note in work.notes()} == {str(folder)}
    assert work.events(EventKind.GENERATION_ENDED)[0].data["failure"]["exit_code"] == 3


HASHING = """
import os, sys
open("hashes", "a").write(f"{hash('cat')}\\n")
sys.exit(3 if os.environ["ORCH_GENERATION"] == "1" else 0)
"""


@pytest.mark.parametrize(
    ("nodes", "env", "of_job", "seed"),
    [(2, {}, {}, "0"), (1, {}, {"PYTHONHASHSEED": "8"}, "8"),
     (1, {"PYTHONHASHSEED": "7"}, {"PYTHONHASHSEED": "8"}, "7")],
)  # fmt: skip
def test_texts_have_the_same_hashes_on_every_node_and_in_every_generation(
    job, tmp_path, monkeypatch, nodes, env, of_job, seed
):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    (tmp_path / "train.py").write_text(HASHING)
    work = job(
        nodes=nodes, ranks=1, command=["python", "train.py"],
        env={"ORCH_SUBMIT_DIR": str(tmp_path), **env},
    )  # fmt: skip
    work.start(environ=of_job)
    work.ends(*[0] * nodes)
    print_hash = [sys.executable, "-c", "print(hash('cat'))"]
    wanted = subprocess.run(print_hash, env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True).stdout
    found = (tmp_path / "hashes").read_text().splitlines()
    assert len(found) >= nodes + 1
    assert set(found) == {wanted.strip()}


NAMING = """
import json, subprocess, sys
inner = subprocess.run(["sh", "-c", "python -c 'import sys; print(sys.prefix)'"], capture_output=True, text=True)
open("named", "w").write(json.dumps([sys.executable, sys.prefix, inner.stdout.strip()]))
"""


@pytest.mark.parametrize("word", ["python", "python3"])
def test_python_is_the_interpreter_of_the_run_whatever_path_has(job, tmp_path, monkeypatch, word):
    other = tmp_path / "bin"
    other.mkdir()
    for name in ("python", "python3"):
        (other / name).write_text("#!/bin/sh\nexit 3\n")
        (other / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{other}:/usr/bin:/bin")
    (tmp_path / "train.py").write_text(NAMING)
    job(nodes=1, ranks=1, command=[word, "train.py"], env={"ORCH_SUBMIT_DIR": str(tmp_path)}).ends(0)
    assert json.loads((tmp_path / "named").read_text()) == [sys.executable, sys.prefix, sys.prefix]


def test_a_path_of_the_configuration_says_which_python_is_meant():
    config = JobConfig(command=("python", "train.py"), env={"PATH": "/opt/python/bin"})
    assert with_interpreter(config, {}) == ("python", "train.py")
    assert with_interpreter(JobConfig(command=("python3.9", "train.py")), {}) == ("python3.9", "train.py")


def test_a_restore_test_finds_its_program_where_the_image_has_it():
    elsewhere = "/home/me/orch/trainer/agent/user_command/restore_program.py"
    config = JobConfig(command=("python", elsewhere, "python", "restore.py"))
    assert with_interpreter(config, {}) == (sys.executable, str(RESTORE_PROGRAM), "python", "restore.py")


def test_the_folder_of_the_submit_is_read_from_the_runs_record(job, tmp_path):
    work = job(nodes=1, ranks=1)
    work.run.run.write_text(dump_line({"identity": {"submit_dir": str(tmp_path)}}))
    work.ends(0)
    assert work.notes()[0]["cwd"] == str(tmp_path)


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_command_never_begins_anew_in_another_folder(job, tmp_path, restarts):
    home, away = tmp_path / "project", tmp_path / "moved"
    home.mkdir()
    program = "import os, signal; open('seen', 'a').write('x'); os.kill(os.getpid(), signal.SIGKILL)"
    (home / "train.py").write_text(program)
    work = job(nodes=1, ranks=1, command=["python", "train.py"], recovery={"restarts_in_place": 3})
    work.run.run.write_text(dump_line({"identity": {"submit_dir": str(home)}}))
    if not restarts:
        home.rename(away)
    work.start()
    work.go()
    if restarts:
        until(lambda: (home / "seen").exists())
        home.rename(away)
    assert work.wait(60) == [74], work.story()
    failure = work.outcome().failure
    assert failure.kind == "storage"
    assert f"cannot enter the submit folder {home}: No such file or directory; mount it" in failure.reason
    assert not (work.run.path / "seen").exists()
    assert work.events(EventKind.CODE_CHANGED) == []
    assert work.attempt.code.exists() == bool(restarts)
    assert not restarts or "train.py" in CodeRecord.read(work.attempt.code).files


def test_a_command_that_fails_alike_three_times_at_once_is_the_users_error(job):
    work = job("exit:2@1@*", "hang@*@*", nodes=1).ends(78)
    outcome = work.outcome()
    assert (outcome.generations, outcome.failure.kind, outcome.failure.step) == (3, "user_error", None)
    assert "ended with exit code 2, 3 times in a row within" in outcome.reason
    assert outcome.failure.lines == ("hello from rank 1",)


def test_a_command_that_only_lost_a_peer_is_never_to_blame(job):
    program = "raise RuntimeError('[pair.cc:547] Connection closed by peer [127.0.0.1]:4')"
    work = job(nodes=1, ranks=1, command=[sys.executable, "-c", program], recovery={"restarts_in_place": 3}).ends(75)
    outcome = work.outcome()
    assert (outcome.generations, outcome.failure.kind) == (4, "unknown")
    assert "lost the connection to a peer" in outcome.reason


SAVING = """
import json, sys
from pathlib import Path
folder = Path(sys.argv[1])
steps = sorted(int(path.name.partition("-")[2]) for path in folder.glob("checkpoint-*"))
def load_checkpoint(path):
    return json.loads(path.read_text())["step"]
step = load_checkpoint(folder / f"checkpoint-{steps[-1]}" / sys.argv[2]) if steps else 0
print("from step", step, flush=True)
for step in range(step + 10, 50, 10):
    (folder / f"checkpoint-{step}").mkdir(exist_ok=True)
    (folder / f"checkpoint-{step}" / sys.argv[2]).write_text(json.dumps({"step": step}))
"""


def saving(job, tmp_path, name="state.json", **config):
    """A program that goes on from the newest of its own checkpoints, and cannot read one that was cut off."""
    (tmp_path / "out").mkdir()
    (tmp_path / "saving.py").write_text(SAVING)
    command = [sys.executable, str(tmp_path / "saving.py"), str(tmp_path / "out"), name]
    return job(
        nodes=1,
        ranks=1,
        command=command,
        checkpoints={"path": str(tmp_path / "out")},
        **{"recovery": {"backoff": 0.1}, **config},
    )


def checkpoint(tmp_path, step, text, name="state.json"):
    folder = tmp_path / "out" / f"checkpoint-{step}"
    folder.mkdir()
    (folder / name).write_text(text)


def test_the_checkpoints_of_a_command_are_its_progress(job, tmp_path):
    work = saving(job, tmp_path).start()
    checkpoint(tmp_path, 10, '{"step": 10}')
    work.ends(0)
    seen = [(event.data["step"], event.data["new"]) for event in work.events(EventKind.CHECKPOINT_SEEN)]
    assert seen == [(10, False), (20, True), (30, True), (40, True)]
    assert work.outcome().step == 40


def test_a_torn_checkpoint_of_a_command_is_set_aside_and_the_older_one_tried(job, tmp_path):
    work = saving(job, tmp_path).start()
    checkpoint(tmp_path, 10, '{"step": 10}')
    checkpoint(tmp_path, 20, '{"ste')
    work.ends(0)
    (aside,) = work.events(EventKind.CHECKPOINT_SET_ASIDE)
    assert (aside.data["step"], aside.data["damaged"], aside.generation) == (20, True, 2)
    assert "state.json is not a complete JSON file" in aside.data["reason"]
    assert (Path(aside.data["path"]) / "state.json").read_text() == '{"ste', "it is never deleted"
    assert "from step 10" in work.attempt.rank_log(0).read_text()
    assert work.outcome().generations in (2, 3), "at once if the older one has been sealed meanwhile"
    assert work.outcome().step == 40


SCANNING = """
import json, os, re, sys
folder = sys.argv[1]
def number(name):
    return list(map(int, re.findall(r"[\\/]?([0-9]+)(?=[^\\/]*$)", name)))[0]
if sys.argv[2] == "largest":  # as accelerate's load_state() without a name
    newest = sorted((os.path.join(folder, name) for name in os.listdir(folder)), key=number)[-1]
else:  # as DeepSpeed's load_checkpoint() without a tag
    with open(os.path.join(folder, "latest")) as latest:
        newest = os.path.join(folder, latest.read().strip())
with open(os.path.join(newest, "state.json")) as file:
    print("from step", json.load(file)["step"], flush=True)
"""


@pytest.mark.parametrize("how", ["largest", "latest"])
def test_programs_that_take_the_largest_number_or_read_latest_find_the_older_one(job, tmp_path, how):
    (tmp_path / "out").mkdir()
    (tmp_path / "scanning.py").write_text(SCANNING)
    command = [sys.executable, str(tmp_path / "scanning.py"), str(tmp_path / "out"), how]
    kept = {"path": str(tmp_path / "out"), "pattern": "checkpoint-*"}
    work = job(nodes=1, ranks=1, command=command, checkpoints=kept).start()
    checkpoint(tmp_path, 5, '{"step": 5}')
    checkpoint(tmp_path, 6, '{"ste')
    if how == "latest":
        (tmp_path / "out" / "latest").write_text("checkpoint-6")
    work.ends(0)
    assert "from step 5" in work.attempt.rank_log(0).read_text()
    (aside,) = work.events(EventKind.CHECKPOINT_SET_ASIDE)
    assert Path(aside.data["path"]).parents[2] == tmp_path, "beside the folder that the program scans"
    assert ("latest now names checkpoint-5" in aside.data["reason"]) == (how == "latest")
    assert work.outcome().generations in (2, 3), "at once if the older one has been sealed meanwhile"


def test_what_fails_from_an_older_checkpoint_too_gets_its_newest_back(job, tmp_path):
    work = saving(job, tmp_path, name="state", recovery={"backoff": 0.5}).start()
    checkpoint(tmp_path, 10, "{'step': 10}", "state")
    checkpoint(tmp_path, 20, "{'step': 20}", "state")
    work.ends(ExitCode.STORAGE)
    outcome = work.outcome()
    assert (outcome.generations, outcome.failure.kind) == (3, "storage")
    assert "raised JSONDecodeError: Expecting property name" in outcome.reason
    assert "its newest checkpoint was checkpoint-20, and checkpoint-10 made no difference" in outcome.reason
    assert len(work.events(EventKind.CHECKPOINT_SET_ASIDE)) == 1
    ended, started = work.events(EventKind.GENERATION_ENDED)[0], work.events(EventKind.GENERATION_STARTED)[1]
    assert started.time - ended.time >= 0.5, "it is not read again at once"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checkpoint-10", "checkpoint-20"]


def test_ranks_that_leave_with_0_because_of_a_signal_have_not_finished(job):
    work = job("trap@*@*").start()
    work.go()
    until(lambda: sum("trapped" in note for note in work.notes()) == 4, story=work.story)
    for note in work.notes():
        if "trapped" in note:
            os.kill(note["pid"], signal.SIGTERM)
    until(lambda: len(work.events(EventKind.RANK_EXITED)) == 4, story=work.story)
    for agent in work.agents:
        agent.send_signal(signal.SIGTERM)
    assert work.wait() == [76, 76], work.story()
    assert (work.outcome().result, work.outcome().reason) == ("stopped", "an agent got SIGTERM")


def test_an_error_file_of_torchs_record_tells_what_was_raised(job):
    program = (
        "import json, os, sys; p = os.environ['TORCHELASTIC_ERROR_FILE']\n"
        "open(p, 'w').write(json.dumps({'message': {'message': 'KeyError: 7', 'extraInfo': {}}})); sys.exit(1)"
    )
    work = job(nodes=1, ranks=1, command=[sys.executable, "-c", program]).ends(78)
    assert work.outcome().failure.exception == "KeyError"
    (kept,) = work.attempt.outcomes.glob("error*")
    errors = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [(one["rank"], one["generation"], one["error"]["message"]["message"]) for one in errors] == [
        (0, generation, "KeyError: 7") for generation in range(1, work.outcome().generations + 1)
    ]


def test_the_budget_of_restarts_is_kept(job):
    work = job("kill@0@*", nodes=1, ranks=1, recovery={"restarts_in_place": 2}).ends(75)
    outcome = work.outcome()
    assert (outcome.generations, outcome.failure.kind, outcome.failure.signal) == (3, "rank_killed", 9)
    assert "2 restarts in place used up" in outcome.reason


def test_reserved_exit_codes_end_the_attempt_at_once(job):
    work = job("exit:77@1@1", "hang@*@*").ends(77, 77)
    assert (work.outcome().failure.kind, work.outcome().failure.node) == ("node_suspect", "local-0")


def test_a_program_that_does_not_exist_says_so_in_its_log(job):
    work = job(nodes=1, ranks=1, command=["/no/such/program"]).ends(78)
    assert "cannot start '/no/such/program'" in work.attempt.rank_log(0).read_text()
    assert "exit code 127: cannot start '/no/such/program'" in work.outcome().reason


NOT_FOUND = {
    "pyhton": (127, "No such file or directory"),  # of that name there is only a folder, which is denied
    "nothing": (127, "No such file or directory"),
    "notes.txt": (126, "Permission denied"),
    "./notes.txt": (126, "Permission denied"),
    "./nothing": (127, "No such file or directory"),
}
ONE_BY_ONE = """
import os, sys
from trainer.agent.fork_server.server import _run_command
folder, *programs = sys.argv[1:]
for program in programs:
    if (pid := os.fork()) == 0:
        _run_command([program], folder)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def test_a_program_that_is_not_found_ends_as_in_a_shell(tmp_path):
    (tmp_path / "pyhton").mkdir()
    (tmp_path / "notes.txt").write_text("no program")
    (tmp_path / "notes.txt").chmod(0o644)
    environ = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    words = [sys.executable, "-c", ONE_BY_ONE, str(tmp_path), *NOT_FOUND]
    ended = subprocess.run(words, capture_output=True, text=True, env=environ)
    assert [int(line) for line in ended.stdout.splitlines()] == [code for code, _ in NOT_FOUND.values()]
    said = [f"cannot start {program!r} in {tmp_path}: {why}" for program, (_, why) in NOT_FOUND.items()]
    assert ended.stderr.splitlines() == said


def test_a_shell_that_reports_its_childs_signal_is_understood(job):
    work = job(nodes=1, ranks=1, command=["sh", "-c", 'test "$ORCH_GENERATION" = 2 || sh -c "kill -9 \\$\\$"; exit $?'])
    work.ends(0)
    assert work.events(EventKind.RANK_EXITED)[0].data["signal"] == 9


def test_submitits_exit_code_is_the_agents(job, tmp_path):
    work = job("exit:78@0@*", nodes=1, ranks=1)
    code = f"""
import submitit, sys, time
from trainer.agent.main import run_agent
executor = submitit.LocalExecutor({str(work.attempt.submission)!r}, python={sys.executable!r} + " -P")
executor.update_parameters(tasks_per_node=1, timeout_min=2, gpus_per_node=0)
job = executor.submit(run_agent, {str(work.run.path)!r}, "1")
print(job.job_id, flush=True)
job._process.wait()
"""
    import subprocess

    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        pid = int(launcher.stdout.readline())
        from trainer.protocol.node_identity import local_job_id

        work.go(job_id=local_job_id(pid))
        launcher.communicate(timeout=60)
    finally:
        launcher.kill()
        launcher.wait()
    until(work.attempt.outcome.exists, 30, work.story)
    assert work.outcome().exit_code == 78
    assert not list(work.attempt.submission.glob("*result.pkl"))


def test_a_program_whose_peer_died_hears_sigterm_and_may_save_before_it_is_killed(job):
    work = job("kill:deaf,trapped@0@1", "trap@1@1", "deaf@2@1", "hang@3@1").ends(0, 0, seconds=60)
    (saved,) = [note for note in work.notes() if "saved" in note]
    assert (saved["rank"], saved["generation"]) == (1, 1)
    ends = {event.data["rank"]: event for event in work.events(EventKind.RANK_EXITED) if event.generation == 1}
    assert {rank: (end.data["exit_code"], end.data["signal"]) for rank, end in ends.items()} == {
        0: (None, 9), 1: (0, None), 2: (None, 9), 3: (None, 15),
    }  # fmt: skip
    assert 4.5 < ends[2].time - ends[3].time < 15, "the deaf one had its time"
