"""One table of sentences: each means the same for whoever reads it, and every row is read by somebody."""

import pytest

from orchestrator.recovery.classify_failure import STANDS_FOR
from trainer.protocol.failures.failure_patterns import TABLE, Meaning, TextSource, has_meaning, log_line_meaning


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("OSError: [Errno 28] No space left on device", Meaning.STORAGE),
        ("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0", Meaning.STORAGE),
        ("[1] is setting up NCCL communicator: Connection closed by remote peer node-3<41112>", Meaning.PEER_GONE),
        ("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]:3319", Meaning.PEER_GONE),
        ("The client socket has timed out after 900000ms", Meaning.NO_RENDEZVOUS),
    ],
)
def test_a_sentence_means_the_same_in_an_error_and_in_a_log(text: str, meaning: Meaning) -> None:
    assert has_meaning(text, meaning)
    assert log_line_meaning(text) is meaning


_OLD = "/usr/bin/python3 is Python 3.9.18, and orch needs 3.11 or newer: install one in the image"


@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        (f"orch-agent: refuses to start: {_OLD}", Meaning.INSTALLATION),
        ("slurmstepd: error: pyxis: failed to import docker image", Meaning.NOT_LAUNCHED),
        ('FATAL:   "python3": executable file not found in $PATH', Meaning.NOT_LAUNCHED),
        ("Error: crun: executable file `python3` not found in $PATH: No such file", Meaning.NOT_LAUNCHED),
        ("ch-run[1]: error: can't execve(2): /x/python3: No such file or directory (a.c:1 2)", Meaning.NOT_LAUNCHED),
        ("chroot: failed to run command '/x/python3': No such file or directory", Meaning.NOT_LAUNCHED),
        ("FATAL: out of luck", None),
    ],
)
def test_a_container_that_cannot_start_the_agent_is_recognized(line: str, meaning: Meaning | None) -> None:
    assert log_line_meaning(line) is meaning


def test_a_stale_file_handle_is_met_by_a_program_and_ends_a_job() -> None:
    text = "OSError: [Errno 116] Stale file handle"
    assert has_meaning(text, Meaning.OUTSIDE)
    assert not has_meaning(text, Meaning.STORAGE)
    assert log_line_meaning(text) is Meaning.STORAGE


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7.28 TiB for an array", Meaning.MEMORY),
        ("MemoryError: ", Meaning.MEMORY),
        ("RuntimeError: Caught MemoryError in DataLoader worker process 0.", Meaning.MEMORY),
        ("RuntimeError: unable to write to file </torch_7_1>: No space left on device (28)", Meaning.MEMORY),
        ("XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 8589934592 bytes.", Meaning.GPU_MEMORY),
        ("RuntimeError: can't start new thread", Meaning.NO_PROCESSES),
        ("BlockingIOError: [Errno 11] Resource temporarily unavailable", Meaning.NO_PROCESSES),
        ("libgomp: Thread creation failed: Resource temporarily unavailable", Meaning.NO_PROCESSES),
        ("OpenBLAS blas_thread_init: pthread_create failed for thread 3 of 8", Meaning.NO_PROCESSES),
        ("ConnectionRefusedError: [Errno 111] Connection refused", Meaning.OUTSIDE),
        ("HTTPError: 503 Server Error: Service Unavailable for url: https://hub/api", Meaning.OUTSIDE),
        ("HTTPError: HTTP Error 429: Too Many Requests", Meaning.OUTSIDE),
        ("ConnectionError: HTTPSConnectionPool(host='hub', port=443): Max retries exceeded", Meaning.OUTSIDE),
        ("ReadTimeout: HTTPSConnectionPool(host='hub', port=443): Read timed out.", Meaning.OUTSIDE),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", Meaning.OUTSIDE),
        ("SSLError: [SSL: UNEXPECTED_EOF_WHILE_READING] EOF occurred in violation of protocol", Meaning.OUTSIDE),
    ],
)
def test_what_libraries_raise(text: str, meaning: Meaning) -> None:
    assert has_meaning(text, meaning)


@pytest.mark.parametrize("code", ["401 Client Error: Unauthorized", "404 Client Error: Not Found"])
def test_an_answer_that_stays_the_same_is_no_outage(code: str) -> None:
    assert not has_meaning(f"HTTPError: {code} for url: https://hub/api/500", Meaning.OUTSIDE)


def test_a_limit_of_the_kernel_is_no_full_disk() -> None:
    assert not has_meaning("OSError: [Errno 28] inotify watch limit reached", Meaning.STORAGE)
    assert not has_meaning("ValueError: the MemoryError handler was called twice", Meaning.MEMORY)


def test_what_orch_itself_says_of_a_failed_save_explains_no_end_of_a_job() -> None:
    for words in ("no space left on device", "disk quota exceeded", "read-only file system", "input/output error"):
        assert has_meaning(f"saves failing since step 30: {words} (/runs/gpt-1)", Meaning.STORAGE)
        assert log_line_meaning(f"saves failing since step 30: {words} (/runs/gpt-1)") is None


def test_a_store_that_is_not_met_may_be_that_of_a_lost_peer() -> None:
    text = "The client socket has failed to connect to any network address of (n1, 29500)"
    assert has_meaning(text, Meaning.PEER_GONE)
    assert has_meaning(text, Meaning.NO_RENDEZVOUS)


def test_what_a_program_says_in_passing_is_no_sign_in_a_job_s_log() -> None:
    for text in ("Broken pipe", "CUDA out of memory", "MemoryError", "Address already in use", "load_checkpoint"):
        assert log_line_meaning(text) is None
    assert not has_meaning("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0", Meaning.MEMORY)


def test_of_a_line_the_first_row_counts() -> None:
    assert (
        log_line_meaning("*** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***") is Meaning.TIME_LIMIT
    )
    assert log_line_meaning("*** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***") is Meaning.CANCELLED


def test_every_meaning_of_a_log_line_stands_for_a_failure() -> None:
    assert {row.meaning for row in TABLE if TextSource.JOB_LOG in row.places} == STANDS_FOR.keys()
    assert {row.meaning for row in TABLE} == set(Meaning)
