"""What Slurm prints, as values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.scheduler.slurm_text import (
    SACCT_FIELDS,
    SEPARATOR,
    SQUEUE_FIELDS,
    Ending,
    Garbage,
    epoch,
    exit_pair,
    expand_nodes,
    fold_nodes,
    join_resized,
    plain_state,
    read_accounting,
    read_queue,
    wait_status,
)

QUEUE = {
    "JobID": "12", "State": "RUNNING", "Reason": "None", "exit_code": "0", "RestartCnt": "0",
    "PriorityLong": "4294901757", "SubmitTime": "2026-11-21T01:31:08", "EndTime": "2026-11-22T01:31:08",
    "NodeList": "n[1-2]", "Comment": "orch:a/1",
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
    (job,) = read_queue(queue())
    assert (job.job_id, job.name, job.state, job.nodes) == ("12", "orch-a-1-abcd1234", "RUNNING", ("n1", "n2"))
    assert (job.submit_time, job.comment, job.reason, job.held) == ("2026-11-21T01:31:08", "orch:a/1", "", False)
    assert job.end_time == epoch("2026-11-22T01:31:08")
    assert (job.exit_code, job.signal, job.source) == (None, None, "queue")


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
    assert read_queue(queue(**changes))[0].held is held


def test_a_newline_in_somebodys_job_name_hides_no_other_job() -> None:
    jobs = read_queue(queue(JobID="1", Name="we|ird\nname") + queue(JobID="2"))
    assert [(job.job_id, job.name) for job in jobs] == [("1", "we|ird\nname"), ("2", "orch-a-1-abcd1234")]


@pytest.mark.parametrize(
    "text", ["slurm_load_jobs error", queue()[:-40], queue(JobID="x"), queue(State=""), "x" + queue(), queue() + "x"]
)
def test_garbage_is_no_answer(text: str) -> None:
    with pytest.raises(Garbage):
        read_queue(text)


def test_a_truncated_host_list_is_no_answer() -> None:
    with pytest.raises(Garbage, match="cut NodeList short"):
        read_queue(queue(NodeList="n" * 16384))


def test_an_empty_queue_is_an_answer() -> None:
    assert read_queue("") == []
    assert read_accounting("\n") == []


def test_a_row_of_accounting() -> None:
    (job,) = read_accounting(accounting())
    assert (job.state, job.exit_code, job.signal, job.source) == ("CANCELLED", None, 15, "accounting")


def test_a_row_whose_owner_accounting_cannot_name_is_left_out() -> None:
    assert read_accounting(accounting(JobName="allocation", NodeList="None assigned")) == []


def test_a_job_that_lost_nodes_on_its_way_is_one_job_submitted_when_it_was() -> None:
    first = accounting(State="RESIZING", Submit="2026-11-21T01:31:08", NodeList="n[1-4]")
    second = accounting(State="RESIZING", Submit="2026-11-21T02:00:00", NodeList="n[1-3]")
    last = accounting(State="COMPLETED", ExitCode="0:0", Submit="2026-11-21T03:00:00", NodeList="n[1-2]")
    other = accounting(JobName="orch-b-1-abcd1234", State="RUNNING", Submit="2026-11-22T01:00:00")
    whole, reused = join_resized(read_accounting(last + first + other + second))
    assert (whole.state, whole.submit_time, whole.nodes) == ("COMPLETED", "2026-11-21T01:31:08", ("n1", "n2"))
    assert (reused.name, reused.submit_time) == ("orch-b-1-abcd1234", "2026-11-22T01:00:00")
    (going_on,) = join_resized(read_accounting(first + second))
    assert (going_on.state, going_on.submit_time) == ("RESIZING", "2026-11-21T01:31:08")


def test_an_exit_code_belongs_to_ended_jobs_only() -> None:
    assert read_accounting(accounting(State="RUNNING", ExitCode="0:0"))[0].exit_code is None
    assert read_queue(queue(State="FAILED", exit_code="768"))[0].exit_code == 3


@pytest.mark.parametrize(
    ("text", "word"),
    [("CANCELLED by 0", "CANCELLED"), ("CANCELLED+", "CANCELLED"), ("OUT_OF_MEMORY", "OUT_OF_MEMORY"), ("", "")],
)
def test_states_are_slurms_words_alone(text: str, word: str) -> None:
    assert plain_state(text) == word


def test_exit_codes_and_signals() -> None:
    assert exit_pair("0:15") == Ending(None, 15)
    assert exit_pair("76:0") == Ending(76, None)
    assert exit_pair("") == Ending(None, None)
    assert wait_status("768") == Ending(3, None)
    assert wait_status("9") == Ending(None, 9)
    assert wait_status("N/A") == Ending(None, None)


def test_times_are_utc_and_unknown_ones_are_none() -> None:
    assert epoch("1970-01-02T00:00:00") == 86400.0
    for text in ("N/A", "Unknown", "NONE", "", "2026-11-21"):
        assert epoch(text) is None


def test_host_lists_keep_their_order_and_zeros() -> None:
    assert expand_nodes("gpu[008-010],login") == ("gpu008", "gpu009", "gpu010", "login")
    for text in ("", "(null)", "None assigned"):
        assert expand_nodes(text) == ()
    with pytest.raises(Garbage):
        expand_nodes("gpu[1-")


@given(st.sets(st.integers(0, 30), min_size=1))
def test_folding_and_expanding_are_inverse(numbers: set[int]) -> None:
    names = tuple(f"node{number:04d}" for number in sorted(numbers))
    assert expand_nodes(fold_nodes(names)) == names
