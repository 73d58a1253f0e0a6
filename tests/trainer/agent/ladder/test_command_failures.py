"""Whether a user's own program is to blame, on tables: what it raised, how long it ran, what it wrote and saved."""

import signal
from dataclasses import replace
from typing import Any

import pytest

from trainer.agent.ladder.command_failures import (
    LONGEST_SECONDS,
    REPEATS,
    START_SECONDS,
    CommandPast,
    NewestCheckpoint,
    command_cause,
)
from trainer.protocol.failures.outcome import FailureKind
from trainer.protocol.failures.rank_end import RankEnd


def end(rank: int = 0, **fields: Any) -> RankEnd:
    return RankEnd(**{"rank": rank, "node": f"n{rank}", "at": float(rank), "step": None, "exit_code": 1, **fields})


def raised(what: str = "ValueError", message: str = "bad", **fields: Any) -> RankEnd:
    return end(exception=what, message=message, **fields)


class Program:
    """Fails as it is told to, generation after generation, as the coordinator would remember it."""

    def __init__(self, **past: Any) -> None:
        self.past: dict[str, Any] = {"failures": (), "older": "checkpoint-20", **past}

    def fails(self, *ends: RankEnd, seconds: float = 5.0, **past: Any) -> Any:
        now = CommandPast(**{**self.past, **past})
        cause = command_cause(ends, now, seconds)
        if cause.own is not None:
            self.past["failures"] = (*self.past["failures"], cause.own)
        elif now.saved or seconds > START_SECONDS:
            self.past["failures"] = ()
        return cause

    def times(self, count: int, *ends: RankEnd, seconds: float = 5.0, **past: Any) -> Any:
        return [self.fails(*ends, seconds=seconds, **past) for _ in range(count)][-1]


def test_the_same_exception_soon_after_the_start_three_times_in_a_row_is_the_users():
    program = Program()
    for _ in range(REPEATS - 1):
        cause = program.fails(raised())
        assert (cause.retry, cause.failure.kind, cause.failure.step) == (True, FailureKind.UNKNOWN, None)
    cause = program.fails(raised())
    assert (cause.retry, cause.failure.kind) == (False, FailureKind.USER_ERROR)
    assert cause.failure.reason == "rank 0 on n0 raised ValueError: bad, 3 times in a row within 5 s of its start"


@pytest.mark.parametrize("code", [126, 127])
def test_why_a_program_did_not_start_is_in_the_reason(code):
    said = "cannot start 'pyhton' in /x: No such file or directory"
    reason = Program().times(3, end(exit_code=code, lines=("generation 1", said))).failure.reason
    assert reason.startswith(f"rank 0 on n0 ended with exit code {code}: {said}, 3 times in a row")
    assert "cannot start" not in Program().fails(end(exit_code=1, lines=(said,))).failure.reason


@pytest.mark.parametrize(
    "failing",
    [raised("RuntimeError", "can't start new thread"), end(lines=("bash: fork: Resource temporarily unavailable",))],
)
def test_a_node_that_starts_no_process_is_not_the_programs_fault(failing):
    cause = Program().times(5, failing)
    assert (cause.failure.kind, cause.retry, cause.outside, cause.own) == (FailureKind.UNKNOWN, True, True, None)
    assert cause.failure.reason.count("`ulimit -u` and pids.max") == 1


def test_memory_that_is_short_again_and_again_stays_that():
    program, short = Program(), raised("OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 GiB")
    for _ in range(REPEATS - 1):
        assert program.fails(short).failure.kind is FailureKind.OUT_OF_MEMORY
    cause = program.fails(short)
    assert (cause.retry, cause.failure.kind) == (False, FailureKind.OUT_OF_MEMORY)
    assert "reduce the program's use, for example with smaller batches" in cause.failure.reason
    killed = Program().fails(end(exit_code=None, signal=signal.SIGKILL, out_of_memory="the kernel killed it"))
    assert (killed.retry, killed.failure.kind) == (True, FailureKind.OUT_OF_MEMORY)


def test_a_bare_exit_code_soon_after_the_start_is_judged_by_the_last_line():
    typo = end(exit_code=2, lines=("usage: train.py", "train.py: error: unrecognized arguments: --epohcs"))
    assert not Program().times(3, typo).retry
    program = Program()
    program.times(2, typo)
    assert program.fails(end(exit_code=2, lines=("train.py: error: cannot open the license",))).retry


@pytest.mark.parametrize(
    ("failing", "past", "words"),
    [
        ({"seconds": START_SECONDS + 1}, {}, "5 min after its start"),  # a bare exit code of a program that trained
        ({"seconds": LONGEST_SECONDS + 1}, {}, "60 min after its start"),
        ({"seconds": 60.0}, {"saved": True}, "after it had saved a checkpoint of its own"),
    ],
)
def test_a_program_that_trained_is_not_to_blame_for_failing_again(failing, past, words):
    cause = Program().times(9, end(), **failing, **past)
    assert (cause.retry, cause.failure.kind) == (True, FailureKind.UNKNOWN)
    assert words in cause.failure.reason


def test_an_exception_that_comes_back_after_the_same_time_and_output_is_the_users_although_the_start_was_long():
    cause = Program().times(3, raised(written=9000), seconds=1800.0)
    assert (cause.retry, cause.failure.kind) == (False, FailureKind.USER_ERROR)
    assert "3 times in a row within 30 min of its start" in cause.failure.reason


@pytest.mark.parametrize(
    "other",
    [
        {"ends": raised("KeyError")},
        {"ends": raised(message="worse")},
        {"ends": raised(), "seconds": 120.0},
        {"ends": raised(written=5000)},
        {"ends": raised(), "saved": True},
    ],
)
def test_what_differs_begins_a_new_row(other):
    program = Program()
    program.times(2, raised())
    ends = other.pop("ends")
    assert program.fails(ends, **other).retry
    assert program.fails(raised()).retry
    assert program.fails(raised()).retry


def test_numbers_in_what_was_raised_may_differ():
    program = Program()
    for number in range(REPEATS):
        cause = program.fails(raised(message=f"index {number} of <Row at 0x7f{number}a>"))
    assert not cause.retry


def test_days_of_training_between_two_failures_make_them_two():
    program = Program()
    for _ in range(20):
        assert program.fails(raised()).retry
        assert program.fails(end(exit_code=None, signal=int(signal.SIGKILL)), seconds=86400.0).retry
        assert program.past["failures"] == ()


@pytest.mark.parametrize(
    ("ends", "kind", "words"),
    [
        (
            [raised("RuntimeError", "Connection closed by peer", secondary=True)],
            FailureKind.UNKNOWN,
            "lost the connection to a peer",
        ),
        ([end(0), end(1, exit_code=None, signal=9)], FailureKind.RANK_KILLED, "rank 1 on n1 was killed by SIGKILL"),
        ([raised("DistStoreError", "2/4 clients joined")], FailureKind.UNKNOWN, "could not connect to its peers"),
        ([raised("gaierror", "Temporary failure in name resolution")], FailureKind.UNKNOWN, "gaierror"),
        ([raised("OSError", "[Errno 116] Stale file handle")], FailureKind.UNKNOWN, "Stale file handle"),
        ([raised("BrokenPipeError", "[Errno 108] Cannot send: '/o/c/a.pt'")], FailureKind.UNKNOWN, "Cannot send"),
        ([raised("RuntimeError", "DataLoader worker (pid 7) is killed by signal: x")], FailureKind.UNKNOWN, "pid"),
        ([raised("OSError", "[Errno 28] No space left on device")], FailureKind.STORAGE, "its storage"),
        ([end(exit_code=75)], FailureKind.UNKNOWN, "asked to be restarted"),
        ([end(exit_code=78)], FailureKind.USER_ERROR, "asked never to be retried"),
    ],
)  # fmt: skip
def test_what_follows_from_something_else_is_not_counted(ends, kind, words):
    cause = Program().times(9, *ends)
    assert cause.failure.kind is kind
    assert words in cause.failure.reason
    assert cause.own is None


TORN = NewestCheckpoint(identity="checkpoint-50.1f", name="checkpoint-50", damage="lacks trainer_state.json")
SOUND = NewestCheckpoint(identity="checkpoint-50.1f", name="checkpoint-50")
OLDER = NewestCheckpoint(identity="checkpoint-40.1e", name="checkpoint-40")
LOADING = raised("SafetensorError", "Error while deserializing header: incomplete metadata")


def traceback(code: str, *said: str, file: str = "/home/ml/train.py") -> tuple[str, ...]:
    """As most programs end that had printed what they resume from."""
    frames = "Traceback (most recent call last):", f'  File "{file}", line 50, in <module>', f"    {code}"
    return ("Resuming training from out/checkpoint-50", *frames, *said)


@pytest.mark.parametrize(
    ("newest", "failing", "aside"),
    [
        (TORN, raised(), True),
        (TORN, end(exit_code=None, signal=int(signal.SIGBUS)), True),
        (SOUND, LOADING, True),
        (SOUND, raised("error", "Error -3 while decompressing data", lines=traceback("load('checkpoint-50')")), True),
        (SOUND, raised("KeyError", lines=traceback("load(path / 'checkpoint-50')", "KeyError: bad")), False),
        (SOUND, raised(), False),  # nothing says that it was loading anything
        (SOUND, end(exit_code=None, signal=int(signal.SIGBUS)), False),
        (TORN, end(exit_code=None, signal=int(signal.SIGKILL)), False),  # somebody else's doing
    ],
)
def test_the_newest_checkpoint_is_set_aside_after_two_failures_right_after_a_start_from_it(newest, failing, aside):
    program = Program(newest=newest)
    assert not program.fails(failing).set_aside
    cause = program.fails(failing)
    assert bool(cause.set_aside) == aside
    assert cause.retry
    if aside:
        wanted = "checkpoint-50, its newest checkpoint, will be moved away, so that checkpoint-20 becomes the newest: "
        assert cause.set_aside.startswith(wanted)


def test_the_last_whole_checkpoint_is_never_given_up():
    program = Program(newest=SOUND, older="")
    assert [program.fails(LOADING).tries for _ in range(2)] == [1, 2]
    last = program.fails(LOADING)
    assert (last.set_aside, last.retry, last.failure.kind) == ("", False, FailureKind.STORAGE)
    assert last.failure.reason.endswith(
        "its newest checkpoint is checkpoint-50, and orch finds no complete older one: repair it, or move it away to "
        "start again"
    )


def test_a_damaged_one_goes_only_where_a_whole_one_is_left_or_it_is_the_first_of_all():
    assert not Program(newest=TORN, older="", first=False).times(2, LOADING).set_aside
    assert Program(newest=TORN, older="").times(3, LOADING).failure.kind is FailureKind.STORAGE
    first = Program(newest=TORN, older="", first=True).times(2, LOADING).set_aside
    assert "will be moved away: it lacks trainer_state.json; orch finds no complete older one" in first
    cut = Program(newest=replace(TORN, lacking=False), older="", first=True)
    assert not cut.times(2, raised("ConnectionError")).set_aside  # it was not loading anything
    assert not cut.fails(LOADING).set_aside
    assert cut.fails(LOADING).set_aside
    assert not Program(newest=SOUND, older="", first=True).times(2, LOADING).set_aside


@pytest.mark.parametrize("newest", [SOUND, TORN])
@pytest.mark.parametrize(
    ("what", "kind"), [("KeyError", FailureKind.USER_ERROR), ("OutOfMemoryError", FailureKind.OUT_OF_MEMORY)]
)
def test_a_failure_that_shows_nothing_of_loading_keeps_its_kind_and_no_advice_costs_the_only_checkpoint(
    newest, what, kind
):
    failure = Program(newest=newest, older="").times(3, raised(what, "bad")).failure
    assert failure.kind is kind
    assert "move it away" not in failure.reason
    assert Program(newest=TORN, older="checkpoint-20", aside=("a", "b", "c")).times(3, raised()).failure.kind is (
        FailureKind.STORAGE
    ), "its bytes cannot be whole, and a whole one is there"


def test_only_failures_from_a_checkpoint_without_a_sign_of_damage_are_paused():
    assert Program(newest=TORN).fails(LOADING).tries == 0
    assert Program(newest=SOUND).fails(LOADING, seconds=START_SECONDS + 1).tries == 0
    assert Program().fails(LOADING).tries == 0


def test_another_failure_from_the_older_one_is_not_called_the_same():
    program = Program(newest=OLDER, aside=("checkpoint-50",))
    program.past["failures"] = (Program(newest=TORN).times(1, LOADING).own,) * 2
    reason = program.times(3, raised("KeyError")).failure.reason
    assert "checkpoint-40 is now the newest, and the program fails differently" in reason
    assert "no difference" not in reason


def test_a_missing_file_says_something_only_of_a_program_that_was_loading():
    lacking = NewestCheckpoint(identity="n", name="checkpoint-50", damage="lacks a.pt, which others have", lacking=True)
    assert Program(newest=lacking).times(2, LOADING).set_aside
    assert not Program(newest=lacking).times(2, raised("OutOfMemoryError", "CUDA out of memory")).set_aside


def test_failures_with_another_cause_do_not_count_against_a_checkpoint_without_a_sign_of_damage():
    program = Program(newest=SOUND)
    assert not program.fails(raised("ConnectionError", "the data server is away")).set_aside
    assert not program.fails(LOADING).set_aside
    assert program.fails(LOADING).set_aside


SHARD = "[Errno 2] No such file or directory: '/mnt/data/imagenet/shard-00017.bin'"
UNZIPPED = "PytorchStreamReader failed reading zip archive: failed finding central directory"
STATE = "'/out/checkpoint-50/state.pt'"
NOT_OF_THE_CHECKPOINT = {
    "file": raised("FileNotFoundError", SHARD, lines=traceback("open(shard, 'rb')")),
    "file-loaded": raised("FileNotFoundError", SHARD, lines=traceback("torch.load(shard)")),
    "file-here": raised("FileNotFoundError", "[Errno 2] No such file or directory: 'base.pt'",
                        lines=traceback("torch.load(base)")),
    "literal": raised("RuntimeError", UNZIPPED, lines=traceback("torch.load('/models/base.pt')")),
    "hub": raised("OSError", "cannot load from https://hub/gpt", lines=traceback("self.load_checkpoint(name)")),
    "gpu-memory": raised("OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 MiB",
                         lines=traceback("return torch.load(p)")),
    "memory": raised("MemoryError", "", lines=traceback("state = torch.load('out/checkpoint-50/state.pt')")),
    "http": raised("JSONDecodeError", "Expecting value: line 1 column 1 (char 0)",
                   lines=traceback("json.loads(answer)")),
    "pipe": raised("EOFError", "", lines=traceback("connection.recv()")),
    "ecc": raised("RuntimeError", "CUDA error: uncorrectable ECC error encountered",
                  lines=("step 54/90 loss=0.1", *traceback("model(batch)"))),
    "driver": raised("RuntimeError", "CUDA error: unspecified launch failure",
                     lines=traceback("torch.load(path, map_location='cuda')")),
    "no-gpu": raised("RuntimeError", "Attempting to deserialize object on a CUDA device but there is none",
                     lines=traceback("torch.load(path)")),
    "sample": raised("UnpicklingError", "pickle data was truncated",
                     lines=traceback("data = self._next_data()", file="/lib/torch/utils/data/dataloader.py")),
    "worker": raised("RuntimeError", "Caught UnpicklingError in DataLoader worker process 0."),
    "another": raised("RuntimeError", "cannot read checkpoint-500", lines=traceback("evaluate(batch)")),
    "handled": raised("ValueError", "bad", lines=("    torch.load(p)", "EOFError: x", *traceback("model(batch)"))),
    "after": raised("ValueError", "bad", lines=(*traceback("model(b)", "ValueError: bad"), "see checkpoint-50")),
    "printed": end(lines=("Resuming training from out/checkpoint-50",)),
    "printed-digest": end(lines=("Resuming from out/checkpoint-50, of digest 7e1f",)),
    "evicted": raised("BrokenPipeError", f"[Errno 108] Cannot send after transport endpoint shutdown: {STATE}"),
    "aborted": raised("ConnectionAbortedError", f"[Errno 103] Software caused connection abort: {STATE}"),
    "host": raised("OSError", f"[Errno 112] Host is down: {STATE}"),
    "remote": raised("OSError", f"[Errno 121] Remote I/O error: {STATE}"),
    "expired": raised("OSError", f"[Errno 127] Key has expired: {STATE}"),
    "busy": raised("OSError", f"[Errno 16] Device or resource busy: {STATE}"),
    "right": raised("PermissionError", f"[Errno 13] Permission denied: {STATE}"),
    "open-files": raised("OSError", f"[Errno 24] Too many open files: {STATE}"),
    "again": raised("BlockingIOError", f"[Errno 11] Resource temporarily unavailable: {STATE}"),
    "rust": raised("SafetensorError", f"I/O error: Stale file handle (os error 116): {STATE}"),
    "unread": raised("RuntimeError", "PytorchStreamReader failed reading file data/0: file read failed",
                     lines=traceback("torch.load('out/checkpoint-50/state.pt')")),
    "thread": raised("RuntimeError", "can't start new thread", lines=traceback("load_checkpoint('out/checkpoint-50')")),
    "gpus": raised("RuntimeError", "No CUDA GPUs are available", lines=traceback("load_checkpoint(path)")),
    "gpus-named": raised("RuntimeError", "CUDA unknown error", lines=traceback("load('out/checkpoint-50').cuda()")),
    "library": raised("ImportError", "libcudart.so.12: cannot open shared object file: No such file or directory",
                      lines=traceback("load('out/checkpoint-50')")),
    "interrupted": raised("KeyboardInterrupt", "", lines=traceback("torch.load('out/checkpoint-50/state.pt')")),
    "refused": raised("RuntimeError", "upload of checkpoint-50 refused: 403 Forbidden"),
    "no-cause": end(lines=("Resuming from out/checkpoint-50", "error: cannot read out/checkpoint-50/model.bin")),
    "wrapped": raised("OSError", "Unable to load weights from out/checkpoint-50/model.bin: corrupted?", lines=(
        *traceback("torch.load(file)", f"OSError: [Errno 108] Cannot send after transport endpoint shutdown: {STATE}"),
        "The above exception was the direct cause of the following exception:", *traceback("load_checkpoint(path)"))),
}  # fmt: skip


@pytest.mark.parametrize("failing", NOT_OF_THE_CHECKPOINT.values(), ids=NOT_OF_THE_CHECKPOINT)
def test_a_checkpoint_that_was_only_printed_before_an_error_stays(failing):
    assert not Program(newest=SOUND).times(2, failing).set_aside


OF_THE_CHECKPOINT = {
    "file": raised("FileNotFoundError", "[Errno 2] No such file or directory: '/out/checkpoint-50/optimizer.pt'"),
    "zip": raised("RuntimeError", UNZIPPED),
    "source": raised("RuntimeError", f"[enforce fail at /src/caffe2/inline_container.cc:145] . {UNZIPPED}"),
    "torch": raised("EOFError", "Ran out of input", lines=traceback("state = torch.load(f'{out}/state.pt')")),
    "ranks": raised("EOFError", "x", lines=tuple(f"[rank0]: {line}" for line in traceback("torch.load(p + '/s.pt')"))),
    "deep": raised("OSError", "[Errno 22] Invalid argument", lines=(
        '  File "/lib/torch/serialization.py", line 1462, in load', "    with _open_zipfile_reader(opened_file) as f:",
    )),
    "json": raised("JSONDecodeError", "Expecting value", lines=traceback("read('out/checkpoint-50/state.json')")),
    "words": raised("RuntimeError", "loader.cc: checkpoint-50 has a bad checksum"),
    "line": end(lines=("Resuming from out/checkpoint-50", "error: out/checkpoint-50/model.bin is truncated")),
    "quoted": raised("FileNotFoundError", 'No such file or directory: "out/checkpoint-50/model.safetensors"'),
    "lacks": raised("ValueError", "Can't find a valid checkpoint at out/checkpoint-50"),
    "bad-message": raised("OSError", f"[Errno 74] Bad message: {STATE}"),
    "shape": raised("ValueError", "Size mismatch between saved [4] and current [5] for w",
                    lines=traceback("dcp.load(state, checkpoint_id=path)")),
    "keys": raised("RuntimeError", "Error(s) in loading state_dict for Net: Missing key(s) in state_dict: w"),
    "wrapped": raised("OSError", "Unable to load weights from pytorch checkpoint file for 'out/checkpoint-50/a.bin'",
        lines=(*traceback("torch.load(file)", "UnpicklingError: invalid load key, '\\x00'."),
        "During handling of the above exception, another exception occurred:", *traceback("load_state_dict(file)"))),
}  # fmt: skip


@pytest.mark.parametrize("failing", OF_THE_CHECKPOINT.values(), ids=OF_THE_CHECKPOINT)
def test_an_error_that_names_the_checkpoint_or_what_loads_it_counts_against_it(failing):
    assert Program(newest=SOUND).times(2, failing).set_aside


@pytest.mark.parametrize("what", ["EOFError", "JSONDecodeError"])
def test_what_ended_too_early_is_the_checkpoint_where_that_has_a_sign_of_damage(what):
    ended = raised(what, "x", lines=traceback("json.load(file)"))
    assert Program(newest=TORN, older="", first=True).times(2, ended).set_aside
    assert not Program(newest=SOUND).times(2, ended).set_aside
    assert Program(newest=SOUND).times(3, ended).failure.kind is FailureKind.STORAGE  # somebody has to look at it


@pytest.mark.parametrize(("name", "path"), [("50", "out/50/state.pt"), ("latest", "out/latest/state.pt")])
def test_a_plain_number_or_word_names_a_checkpoint_only_in_a_path(name, path):
    newest = replace(SOUND, name=name)
    unrelated = raised("ValueError", f"use the latest version; index {name} of 60", lines=traceback("model(batch)"))
    assert not Program(newest=newest).times(2, unrelated).set_aside
    assert Program(newest=newest).times(2, raised("ValueError", f"{path} is truncated")).set_aside


def test_a_program_that_ran_on_from_its_checkpoint_keeps_it():
    assert not Program(newest=TORN).times(5, raised(), seconds=START_SECONDS + 1).set_aside


def test_a_torn_one_that_takes_long_to_load_is_set_aside_all_the_same():
    assert Program(newest=TORN).times(2, LOADING, seconds=START_SECONDS + 600).set_aside
    assert not Program(newest=SOUND).times(2, LOADING, seconds=START_SECONDS + 600).set_aside
    assert not Program(newest=TORN).times(2, LOADING, seconds=START_SECONDS + 600, saved=True).set_aside


def test_an_older_one_that_is_torn_too_follows_at_once_and_one_without_a_sign_does_not():
    torn = Program(newest=OLDER, aside=("checkpoint-50",))
    torn.past["failures"] = Program(newest=TORN).times(1, raised()).own, Program(newest=TORN).times(1, raised()).own
    assert torn.fails(
        raised(), newest=NewestCheckpoint(identity="o", name="checkpoint-40", damage="is empty")
    ).set_aside
    sound = Program(newest=OLDER, aside=("checkpoint-50",), doubtful=True)
    sound.past["failures"] = (Program(newest=SOUND).times(1, LOADING).own,) * 2
    cause = sound.fails(LOADING)
    assert (cause.retry, cause.set_aside, cause.failure.kind) == (False, "", FailureKind.STORAGE)
    assert "its newest checkpoint was checkpoint-50, and checkpoint-40 made no difference" in cause.failure.reason


@pytest.mark.parametrize(
    ("what", "how"),
    [
        ("RuntimeError", "Error(s) in loading state_dict for Linear:"),
        ("RuntimeError", "size mismatch for weight: [2, 4]"),
        ("ValueError", "loaded state dict contains a parameter group that doesn't match the size of optimizer's group"),
        ("UnpicklingError", "Weights only load failed. This file can still be loaded, to do so you have two options"),
    ],
)
def test_whole_checkpoints_that_the_program_no_longer_fits_are_for_it_to_be_mended(what, how):
    misfit = raised(what, how, lines=traceback("model.load_state_dict(torch.load(path))"))
    program = Program(newest=SOUND, older="checkpoint-40")
    assert program.times(2, misfit).set_aside
    failure = program.fails(misfit, newest=OLDER, aside=("checkpoint-50",), doubtful=True).failure
    assert failure.kind is FailureKind.USER_ERROR
    assert "its newest checkpoint was checkpoint-50, and checkpoint-40 made no difference" in failure.reason
    assert Program(newest=SOUND, older="").times(3, misfit).failure.kind is FailureKind.STORAGE, "no other one is known"
    torn = Program(newest=TORN)
    torn.times(2, misfit)
    assert torn.fails(misfit, newest=OLDER, aside=("checkpoint-50",)).failure.kind is FailureKind.STORAGE


def test_the_likely_cause_is_named_when_a_program_trained_before_and_nobody_knows_its_checkpoints():
    lines = ("Traceback (most recent call last):", "FileNotFoundError: /out/checkpoint-50/optimizer.pt")
    cause = Program(trained=True).times(3, raised("FileNotFoundError", "/out/checkpoint-50/optimizer.pt", lines=lines))
    assert "it had trained before, so the likely cause is what it loads now" in cause.failure.reason
    assert "its own newest checkpoint. With checkpoints.path=FOLDER" in cause.failure.reason
    assert cause.failure.lines == lines
    assert "trained before" not in Program().times(3, raised()).failure.reason


def test_what_cannot_be_loaded_is_for_the_storage_to_be_mended():
    assert Program(trained=True).times(3, LOADING).failure.kind is FailureKind.STORAGE
    assert Program().times(3, LOADING).failure.kind is FailureKind.USER_ERROR


def test_a_sigterm_of_a_scripts_own_is_explained():
    cause = Program().fails(end(exit_code=None, signal=signal.SIGTERM))
    assert (cause.retry, cause.failure.kind) == (True, FailureKind.RANK_KILLED)
    assert cause.failure.reason.startswith("rank 0 on n0 was killed by SIGTERM, which orch did not send; a script")
    assert "trap 'kill 0' EXIT" in cause.failure.reason
    assert "kill 0" not in Program().fails(end(exit_code=None, signal=signal.SIGKILL)).failure.reason


def test_a_rank_that_ended_well_before_its_peers_is_the_cause():
    finished, waiting = end(1, exit_code=0, at=1.0), raised("DistBackendError", "Connection closed", secondary=True)
    waiting = replace(waiting, at=2.0)
    program = Program()
    first, _, last = (program.fails(waiting, finished) for _ in range(3))
    assert (first.failure.rank, first.failure.node, first.retry) == (1, "n1", True)
    assert first.failure.reason.startswith("rank 1 on n1 ended with exit code 0 before the others: rank 0 on n0 lost")
    assert (last.retry, "3 times in a row" in last.failure.reason) == (False, True)
    aborted = end(exit_code=None, signal=int(signal.SIGABRT), at=2.0)  # by NCCL's watchdog
    assert Program().fails(aborted, finished).failure.rank == 1
    stopped = replace(finished, at=3.0)  # it was told to end, because its peer had failed
    assert Program().fails(waiting, stopped).failure.rank == 0
