"""Parsing of Slurm's output."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.controller.submission_limits import read_sizes
from orchestrator.scheduler.interface import (
    ENDED_STATES,
    QUEUED_STATES,
    RUNNING_STATES,
    UNREADABLE,
    Resources,
    is_marked,
)
from orchestrator.scheduler.scheduler_instance import read_instance
from orchestrator.scheduler.slurm.command_output import (
    SACCT_FIELDS,
    SEPARATOR,
    SQUEUE_FIELDS,
    TooManyNodes,
    UnreadableField,
    accounting_fields,
    ended_jobs,
    epoch,
    expand_nodes,
    fold_nodes,
    join_resized,
    plain_state,
    queue_fields,
    read_accounting,
    read_ending,
    read_node_states,
    read_queue,
    read_version,
)
from orchestrator.scheduler.slurm.node_capacity import count_usable, read_nodes
from orchestrator.scheduler.slurm.slurm_scheduler import SlurmScheduler
from tests.fakes.recorded_slurm import VERSIONS, RecordedSlurm
from tests.orchestrator.scheduler.conftest import Program, printing

QUEUE = {
    "JobID": "12", "State": "RUNNING", "Reason": "None", "exit_code": "0", "RestartCnt": "0",
    "PriorityLong": "4294901757", "SubmitTime": "2026-11-21T01:31:08",
    "StartTime": "2026-11-21T01:31:09", "EndTime": "2026-11-22T01:31:09",
    "TimeLimit": "1-00:00:00", "Requeue": "0", "Partition": "low", "Account": "(null)", "QOS": "normal",
    "NodeList": "n[1-2]", "Comment": "orch:a/1", "Command": "/runs/a/attempts/001/submission/submission_file_0.sh",
    "STDOUT": "/runs/a/attempts/001/submission/%j_0_log.out",
    "Name": "orch-a-1-abcd1234",
}  # fmt: skip
ACCOUNTING = {
    "JobIDRaw": "12", "State": "CANCELLED by 1000", "Reason": "None", "ExitCode": "0:15",
    "Submit": "2026-11-21T01:31:08", "End": "2026-11-21T01:31:12", "NodeList": "n[1-2]",
    "Comment": "", "JobName": "orch-a-1-abcd1234",
}  # fmt: skip


def queue(**changes: str) -> str:
    row = {**QUEUE, **changes}
    return "".join(f"{row[name]:<{width}}{SEPARATOR}" for name, width in SQUEUE_FIELDS) + "\n"


def accounting(**changes: str) -> str:
    row = {**ACCOUNTING, **changes}
    return "".join(f"{row[name]}{SEPARATOR}" for name in SACCT_FIELDS) + "\n"


def test_a_row_of_the_queue() -> None:
    (job,), whole = read_queue(queue())
    assert whole
    assert (job.job_id, job.name, job.state, job.nodes) == ("12", "orch-a-1-abcd1234", "RUNNING", ("n1", "n2"))
    assert (job.submit_time, job.comment, job.reason, job.held) == ("2026-11-21T01:31:08", "orch:a/1", "", False)
    assert (job.start_time, job.end_time) == (epoch("2026-11-21T01:31:09"), epoch("2026-11-22T01:31:09"))
    assert (job.exit_code, job.signal, job.source) == (None, None, "queue")
    assert job.files == (QUEUE["Command"], QUEUE["STDOUT"])
    assert job.settings == {"time limit": "1-00:00:00", "requeue": "0", "partition": "low", "qos": "normal"}


@pytest.mark.parametrize(
    ("changes", "held"),
    [
        ({"State": "PENDING", "PriorityLong": "0", "Reason": "JobHeldUser"}, True),
        ({"State": "PENDING", "PriorityLong": "0", "Reason": "(launch failed requeued held)"}, True),
        ({"State": "PENDING", "Reason": "Resources"}, False),
        ({"State": "COMPLETED", "PriorityLong": "0"}, False),
    ],
)
def test_held_means_pending_without_priority(changes: dict[str, str], held: bool) -> None:
    assert read_queue(queue(**changes)).jobs[0].held is held


def test_a_newline_in_a_job_name_hides_no_other_job() -> None:
    jobs, _ = read_queue(queue(JobID="1", Name="we|ird\nname") + queue(JobID="2"))
    assert [(job.job_id, job.name) for job in jobs] == [("1", "we|ird\nname"), ("2", "orch-a-1-abcd1234")]


@pytest.mark.parametrize(
    "text", ["slurm_load_jobs error", queue()[:-40], queue(JobID="x"), "x" + queue(), "\x1f\x1f\n", "12 RUNNING"]
)
def test_garbage_is_no_answer(text: str) -> None:
    with pytest.raises(UnreadableField):
        read_queue(text)


@pytest.mark.parametrize("nodes", ["n" * 16384, "gpu-[01-02]-[3", "n[1-"])
def test_an_invalid_host_list_leaves_only_the_nodes_unknown(nodes: str) -> None:
    (job,), whole = read_queue(queue(NodeList=nodes))
    assert (job.state, job.nodes, whole) == ("RUNNING", (), True)


@pytest.mark.parametrize(
    ("nodes", "names"),
    [("n[1-3,5]", ("n1", "n2", "n3", "n5")), ("gpu-[01-02]-[3-4]", ("gpu-01-3", "gpu-01-4", "gpu-02-3", "gpu-02-4"))],
)
def test_host_lists_of_several_ranges(nodes: str, names: tuple[str, ...]) -> None:
    assert read_queue(queue(NodeList=nodes)).jobs[0].nodes == names


NEWER = (26, 5, 5)


def newer_accounting(**changes: str) -> str:
    row = {**ACCOUNTING, "SLUID": "", "FailedNode": "", **changes}
    return "".join(f"{row[name]}{SEPARATOR}" for name in accounting_fields(NEWER)) + "\n"


@pytest.mark.parametrize(
    ("printed", "version"),
    [("slurm-wlm 26.05.5\n", NEWER), ("slurm 25.11.3", (25, 11, 3)), ("slurm 24.11.0-0rc1", (24, 11, 0)), ("?", ())],
)
def test_the_version_of_the_clients(printed: str, version: tuple[int, ...]) -> None:
    assert read_version(printed) == version


def test_columns_that_older_clients_refuse_are_asked_of_newer_ones_only() -> None:
    assert queue_fields(()) == queue_fields((24, 11, 5)) == SQUEUE_FIELDS
    assert [name for name, _ in queue_fields(NEWER)][:2] == ["JobID", "Sluid"]
    assert accounting_fields((22, 5, 8)) == SACCT_FIELDS
    assert set(accounting_fields((24, 11, 5))) - set(SACCT_FIELDS) == {"SLUID", "FailedNode"}


def test_a_row_of_the_queue_with_a_sluid() -> None:
    row = {**QUEUE, "Sluid": "s2V5M8FWE33900", "BatchHost": "n/a", "State": "EXPEDITING", "RestartCnt": "1"}
    text = "".join(f"{row[name]:<{width}}{SEPARATOR}" for name, width in queue_fields(NEWER)) + "\n"
    ((job,), _) = read_queue(text, version=NEWER)
    assert (job.job_id, job.sluid, job.state, job.restarts) == ("12", "s2V5M8FWE33900", "EXPEDITING", 1)


def test_the_node_that_starts_the_script_is_not_always_the_first() -> None:
    def batch_node(**columns: str) -> str:
        version = NEWER if "BatchHost" in columns else ()
        row = {**QUEUE, "Sluid": "s1", "NodeList": "n[1-2]", **columns}
        text = "".join(f"{row[name]:<{width}}{SEPARATOR}" for name, width in queue_fields(version)) + "\n"
        return read_queue(text, version=version).jobs[0].batch_node

    assert batch_node(BatchHost="n2") == "n2"
    assert batch_node(BatchHost="n/a") == ""
    assert batch_node(BatchHost="n/a", NodeList="n2") == "n2"
    assert batch_node() == "n1"  # before 25.11
    (ended,) = read_accounting(newer_accounting(NodeList="n[1-2]"), version=NEWER).jobs
    assert ended.batch_node == ""


def test_every_ended_run_of_a_requeued_job_is_kept_with_its_end_and_its_lost_node() -> None:
    rows = [
        newer_accounting(SLUID="s1", State="NODE_FAIL", ExitCode="1:0", FailedNode="n2", Submit="2026-11-28T01:30:23"),
        newer_accounting(SLUID="s2", State="REQUEUED", ExitCode="75:0", Submit="2026-11-28T01:31:08"),
        newer_accounting(SLUID="s3", State="REQUEUED", ExitCode="0:0", Submit="2026-11-28T01:32:08"),
        newer_accounting(SLUID="s4", State="COMPLETED", ExitCode="0:0", Submit="2026-11-28T01:33:08"),
    ]
    (job,) = ended_jobs(read_accounting("".join(rows), version=NEWER).jobs)
    assert (job.sluid, job.state) == ("s4", "COMPLETED")
    first, second = job.earlier
    assert (first.sluid, first.state, first.nodes_down, first.exit_code) == ("s1", "NODE_FAIL", ("n2",), None)
    assert (second.sluid, second.state, second.exit_code) == ("s2", "FAILED", 75)


def foreign(**changes: str) -> str:
    """Return the row of a job that belongs to no run."""
    theirs = {"JobID": "1", "Name": "eval", "Comment": "", "Command": "/home/e.sh", "STDOUT": "/home/e.out"}
    return queue(**{**theirs, **changes})


OURS, OTHERS = queue(), foreign(JobID="2")
FOREIGN = {
    "a long comment": foreign(Comment="x" * 512),
    "a comment with our separator": foreign(Comment=f"a{SEPARATOR}b"),
    "a name of three lines": foreign(Name="a\nb\n3 c"),
    "no state": foreign(State=""),
    "bytes that are no text": foreign(Name=b"\xff\xfe".decode(errors="replace")),
    "a very long name": foreign(Name="n" * 512),
    "half a host list": foreign(NodeList="gpu-[01-02]-[3"),
    "an array": foreign(JobID="1_[1-3%2]"),
    "a heterogeneous job": foreign(JobID="1+0"),
    "a row cut in its middle": foreign(JobID="1")[:900] + "\n",
    "a warning": "squeue: warning: maintenance on Monday\n",
    "an error": "slurm_load_jobs error: Unable to contact slurm controller\n",
    "a warning with a number": "3 nodes are down\n",
    "an empty line": "\n",
}


@pytest.mark.parametrize("row", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("order", ["before", "after", "between"])
def test_foreign_jobs_cannot_hide_own_jobs(row: str, order: str) -> None:
    rows = {"before": [row, OURS], "after": [OURS, row], "between": [OTHERS, row, OURS]}[order]
    (job,), whole = read_queue("".join(rows), lambda job: job.name.startswith("orch-a-"))
    assert (job.job_id, job.name, job.state, whole) == ("12", "orch-a-1-abcd1234", "RUNNING", True)


@pytest.mark.parametrize(
    "damaged",
    [
        queue(State=""), queue(State="17"), queue(Comment=f"a{SEPARATOR}b"), OURS[:800] + "\n", "x" + OURS,
        OURS[:70] + SEPARATOR + OURS[70:],
    ],
)  # fmt: skip
def test_an_unreadable_own_row_is_reported_and_hides_no_other(damaged: str) -> None:
    listed, _ = read_queue(
        OTHERS + damaged + queue(JobID="13", Name="orch-b-1-abcd1234"), lambda job: is_marked(job, "orch-", {"12"})
    )
    assert listed[-1].name == "orch-b-1-abcd1234"
    assert listed[-1].state == "RUNNING"
    (unreadable,) = listed[:-1]
    assert unreadable.state == UNREADABLE
    assert unreadable.job_id == "12" or unreadable.name == "orch-a-1-abcd1234"
    assert unreadable.reason


@pytest.mark.parametrize("cut", [40, 900, 9000, len(OURS) - 1, len(OURS) - 70])
def test_an_answer_that_ends_in_the_middle_is_not_whole(cut: int) -> None:
    jobs, whole = read_queue(OTHERS + OURS[:cut])
    assert not whole
    assert jobs[0].name == "eval"


def test_a_cut_answer_of_accounting_is_not_whole() -> None:
    assert read_accounting(accounting() + accounting()[:30]).whole is False


@pytest.mark.parametrize("row", ["warning: slow\n", accounting(JobIDRaw="1", JobName=f"a{SEPARATOR}b\nc"), "\n"])
def test_foreign_rows_of_accounting_hide_nothing(row: str) -> None:
    for text in (row + accounting(), accounting() + row):
        (job,), whole = read_accounting(text, lambda job: job.name.startswith("orch-"))
        assert (job.job_id, whole) == ("12", True)


def test_an_empty_queue_is_an_answer() -> None:
    assert read_queue("") == ([], True)
    assert read_accounting("\n") == ([], True)


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_the_names_of_clusters_between_rows_are_no_rows(rows: int) -> None:
    text = "CLUSTER: main\n" + "".join(queue(JobID=str(number)) for number in range(rows)) + "\nCLUSTER: spare\n"
    jobs, whole = read_queue(text)
    assert ([job.job_id for job in jobs], whole) == ([str(number) for number in range(rows)], True)


def test_a_row_of_accounting() -> None:
    (job,), _ = read_accounting(accounting())
    assert (job.state, job.exit_code, job.signal, job.source) == ("CANCELLED", None, 15, "accounting")
    assert job.cancelled_by == 1000


@pytest.mark.parametrize(
    ("row", "unlaunched"),
    [
        ({"NodeList": "n1", "exit_code": "0"}, True),  # its prolog failed, or the disk of its slurmd is full
        ({"NodeList": "n1", "exit_code": "15"}, False),  # scancel while it ran
        ({"NodeList": "", "exit_code": "0"}, False),  # scancel while it waited
    ],
)
def test_a_cancelled_job_whose_script_never_ran(row: dict[str, str], unlaunched: bool) -> None:
    assert read_queue(queue(State="CANCELLED", **row)).jobs[0].unlaunched is unlaunched
    (recorded,) = read_accounting(
        accounting(State="CANCELLED by 0", ExitCode="0:0", NodeList=row["NodeList"] or "None assigned")
    ).jobs
    assert (recorded.unlaunched, recorded.cancelled_by) == (bool(row["NodeList"]), 0)


def test_a_row_without_an_owner_is_left_out() -> None:
    assert read_accounting(accounting(JobName="allocation", NodeList="None assigned")).jobs == []


def test_a_job_that_lost_nodes_on_its_way_is_one_job_submitted_when_it_was() -> None:
    first = accounting(State="RESIZING", Submit="2026-11-21T01:31:08", NodeList="n[1-4]")
    second = accounting(State="RESIZING", Submit="2026-11-21T02:00:00", NodeList="n[1-3]")
    last = accounting(State="COMPLETED", ExitCode="0:0", Submit="2026-11-21T03:00:00", NodeList="n[1-2]")
    other = accounting(JobName="orch-b-1-abcd1234", State="RUNNING", Submit="2026-11-22T01:00:00")
    whole, reused = join_resized(read_accounting(last + first + other + second).jobs)
    assert (whole.state, whole.submit_time, whole.nodes) == ("COMPLETED", "2026-11-21T01:31:08", ("n1", "n2"))
    assert (reused.name, reused.submit_time) == ("orch-b-1-abcd1234", "2026-11-22T01:00:00")
    (going_on,) = join_resized(read_accounting(first + second).jobs)
    assert (going_on.state, going_on.submit_time) == ("RESIZING", "2026-11-21T01:31:08")


def test_an_exit_code_belongs_to_ended_jobs_only() -> None:
    assert read_accounting(accounting(State="RUNNING", ExitCode="0:0")).jobs[0].exit_code is None
    assert read_queue(queue(State="FAILED", exit_code="768")).jobs[0].exit_code == 3


@pytest.mark.parametrize(
    ("text", "word"),
    [("CANCELLED by 0", "CANCELLED"), ("CANCELLED+", "CANCELLED"), ("OUT_OF_MEMORY", "OUT_OF_MEMORY"), ("", "")],
)
def test_states_are_slurms_words_alone(text: str, word: str) -> None:
    assert plain_state(text) == word


@pytest.mark.parametrize(
    ("state", "text", "ending"),
    [
        ("FAILED", "0:15", (None, 15)),
        ("FAILED", "76:0", (76, None)),
        ("FAILED", "768", (3, None)),
        ("FAILED", "9", (None, 9)),
        ("FAILED", "139", (None, 11)),  # with a core
        ("COMPLETED", "0:0", (0, None)),
        ("COMPLETED", "0", (0, None)),
        ("FAILED", "0:0", (None, None)),
        ("FAILED", "N/A", (None, None)),
        ("FAILED", "", (None, None)),
        ("FAILED", "exit 3", (None, None)),
        ("NODE_FAIL", "0:1", (None, None)),
        ("RUNNING", "0:0", (None, None)),
    ],
)
def test_exit_codes_and_signals(state: str, text: str, ending: tuple[int | None, int | None]) -> None:
    assert read_ending(state, text) == ending


def test_times_are_utc_and_unknown_ones_are_none() -> None:
    assert epoch("1970-01-02T00:00:00") == 86400.0
    for text in ("N/A", "Unknown", "NONE", "", "2026-11-21"):
        assert epoch(text) is None


def test_host_lists_keep_their_order_and_zeros() -> None:
    assert expand_nodes("gpu[008-010],login") == ("gpu008", "gpu009", "gpu010", "login")
    for text in ("", "(null)", "None assigned"):
        assert expand_nodes(text) == ()
    with pytest.raises(UnreadableField):
        expand_nodes("gpu[1-")


@pytest.mark.parametrize(
    "text", ["n[1-99999999]", "n[1-400]r[1-400]", "n[1-9,5-999999]x", f"n[1-{'9' * 5000}]", "a,n[1-60000],m[1-60000]"]
)
def test_a_host_list_of_too_many_nodes_is_not_expanded(text: str) -> None:
    with pytest.raises(TooManyNodes):
        expand_nodes(text)


def test_a_host_list_counts_what_it_names() -> None:
    assert len(expand_nodes("n[1-300]r[1-300]")) == 90_000
    assert len(expand_nodes("n[0-999999/1000],login")) == 1001


@given(st.sets(st.integers(0, 30), min_size=1))
def test_folding_and_expanding_are_inverse(numbers: set[int]) -> None:
    names = tuple(f"node{number:04d}" for number in sorted(numbers))
    assert expand_nodes(fold_nodes(names)) == names


@pytest.fixture(params=VERSIONS)
def recorded(request: pytest.FixtureRequest) -> RecordedSlurm:
    return RecordedSlurm(request.param)


ENDS = {
    "succeeds": ("COMPLETED", 0, None),
    "exits-3": ("FAILED", 3, None),
    "is-killed": ("FAILED", None, 9),
    "is-terminated": ("FAILED", None, 15),
    "loses-its-node": ("NODE_FAIL", None, None),
}
"""State, exit code and signal."""


def test_how_a_job_ended_is_the_same_in_every_version(recorded: RecordedSlurm) -> None:
    queue = {job.name: job for job in read_queue(recorded.queue()).jobs}
    rows = {job.name: job for job in ended_jobs(read_accounting(recorded.accounting()).jobs)}
    for jobs in (queue, rows):
        seen = {name: (jobs[name].state, jobs[name].exit_code, jobs[name].signal) for name in ENDS}
        assert seen == ENDS
    assert [queue[name].exit_code for name in ("exits-128", "exits-137")] == [128, 137]
    # Before 25.11 sacct takes 128 off: what is left of 128 is unknown, and no success.
    assert rows["exits-128"].exit_code in (None, 128)


STATES = {
    "runs": ("RUNNING", False, 0),
    "is-held": ("PENDING", True, 0),
    "waits": ("PENDING", False, 0),
    "is-requeued-plain": ("PENDING", False, 1),
    "is-requeued-held": ("PENDING", True, 1),
    "is-requeued-special": ("SPECIAL_EXIT", False, 1),
    "is-cancelled": ("CANCELLED", False, 0),
    "is-cancelled-while-it-waits": ("CANCELLED", False, 0),
    "is-preempted": ("PREEMPTED", False, 0),
}
"""State, whether it is held, restarts."""


def test_states_of_the_queue_are_the_same_in_every_version(recorded: RecordedSlurm) -> None:
    jobs, whole = read_queue(recorded.queue())
    found = {job.name: job for job in jobs}  # the last one of a name
    assert whole
    assert {name: (found[name].state, found[name].held, found[name].restarts) for name in STATES} == STATES
    assert found["reaches-its-limit"].state == "TIMEOUT"
    assert {job.state for job in jobs} <= QUEUED_STATES | RUNNING_STATES | ENDED_STATES
    assert found["runs"].nodes == ("n1",)
    assert found["runs"].settings["time limit"] == "10:00"


def test_a_requeued_job_is_one_job_and_its_old_row_in_accounting_is_none(
    recorded: RecordedSlurm, program: Program, tmp_path: Path
) -> None:
    job_id = recorded.job_id("is-requeued-plain")
    rows = recorded.accounting(lambda row: row["JobIDRaw"] == job_id)
    assert "REQUEUED" in rows
    program("squeue", printing(tmp_path, "queue", recorded.queue(lambda row: row["JobID"] == job_id)))
    program("sacct", printing(tmp_path, "rows", rows))
    job = SlurmScheduler().poll([job_id])[job_id]
    assert (job.state, job.restarts) == ("PENDING", 1)
    # Cancelled before it began again, it leaves no other row; the queue forgets it in the end.
    program("squeue", "true")
    assert SlurmScheduler().find("is-requeued", {job_id}) == []
    assert SlurmScheduler().poll([job_id]) == {}


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "CANCELLED", "REQUEUED", "RESIZING"])
def test_a_row_that_no_slurm_will_ever_change_is_no_job(program: Program, tmp_path: Path, state: str) -> None:
    program("squeue", "true")
    program("sacct", printing(tmp_path, "rows", accounting(JobIDRaw="7", State=state, ExitCode="0:0", End="Unknown")))
    assert SlurmScheduler().poll(["7"]) == {}


def test_the_newest_row_of_an_ended_requeued_job_counts(program: Program, tmp_path: Path) -> None:
    rows = (
        accounting(JobIDRaw="7", State="NODE_FAIL", Submit="2026-11-21T01:00:00")
        + accounting(JobIDRaw="7", State="REQUEUED", Submit="2026-11-21T02:00:00")
        + accounting(JobIDRaw="7", State="FAILED", ExitCode="78:0", Submit="2026-11-21T03:00:00")
    )
    program("squeue", "true")
    program("sinfo", "true")
    program("sacct", printing(tmp_path, "rows", rows))
    job = SlurmScheduler().poll(["7"])["7"]
    assert (job.state, job.exit_code, job.submit_time) == ("FAILED", 78, "2026-11-21T03:00:00")


def test_nodes_are_read_the_same_in_every_version(recorded: RecordedSlurm) -> None:
    nodes = frozenset({"n1", "n2", "n3", "n4"})
    shown = recorded.asked["sinfo states"]["stdout"]
    assert read_node_states(shown, nodes, frozenset({"DRAINED", "DRAINING"})) == {"n3"}
    assert count_usable(Resources(nodes=4), (), read_nodes(recorded.asked["sinfo usable"]["stdout"])) == 4
    assert read_sizes(recorded.asked["sinfo sizes"]["stdout"], "high") == 4
    assert read_sizes(recorded.asked["sinfo sizes"]["stdout"], "") == 4


def test_which_slurm_answers_is_read_the_same_in_every_version(recorded: RecordedSlurm) -> None:
    assert read_instance(recorded.asked["config"]).startswith("lab@")


def test_a_job_that_ends_during_the_lookup_of_its_script(
    recorded: RecordedSlurm, program: Program, tmp_path: Path
) -> None:
    answer = recorded.asked["script of an unknown job"]
    assert (answer["exit"], answer["stdout"]) == (0, "")
    job_id = recorded.job_id("is-held")
    program(
        "squeue", printing(tmp_path, "queue", recorded.queue(lambda row: row["JobID"] == job_id).replace("orch:", ""))
    )
    program("scontrol", "true")
    assert SlurmScheduler().poll([job_id])[job_id].script_tag is None
