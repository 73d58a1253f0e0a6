"""The step of a user's own program, read from what it writes."""

import asyncio
import time
from pathlib import Path

import pytest

from trainer.agent.attempt_state.published_files import AttemptProgress
from trainer.agent.user_command import progress
from trainer.agent.user_command.progress import CommandStep, StepWatch, newest_step
from trainer.protocol.command_progress import CommandProgressConfig
from trainer.protocol.messages.ranks import generation_mark

STEP = r"step (?P<step>\d+)(/(?P<total>\d+))?( loss (?P<loss>\S+))?"
TEXTS = {
    "newest line": ("step 1/60 loss 4.5\nstep 2/60 loss 4.25\nsaved\n", CommandStep(step=2, total=60, loss=4.25)),
    "progress bar": (" 1%| step 1/60\r 2%| step 2/60\r 3%| step 3/60 ", CommandStep(step=3, total=60)),
    "no total": ("step 1200\n", CommandStep(step=1200)),
    "no number": ("step 7 loss nan\n", CommandStep(step=7)),
    "nothing": ("epoch 1\n", None),
    "too long a line": (f"{'x' * 2000} step 9\nstep 8\n{'y' * 2000} step 10\n", CommandStep(step=8)),
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_newest_line_that_matches(name: str) -> None:
    text, found = TEXTS[name]
    assert newest_step(text, STEP) == found


def test_what_is_no_whole_number_is_no_step() -> None:
    assert newest_step("step many\nstep 4\nstep 1.5e3\n", r"step (?P<step>\S+)") == CommandStep(step=4)
    assert newest_step("step 12,000\n", r"step (?P<step>\S+)") == CommandStep(step=12000)


class Program:
    """Writes; the coordinator looks at its log or its file, as often as a test says."""

    def __init__(self, folder: Path, path: str = "", pattern: str = STEP) -> None:
        self.folder, self.log, self.now = folder, folder / "rank-00000.log", 100.0
        self.progress = AttemptProgress(1, "1", lambda: 0.0)
        config = CommandProgressConfig(path=path, pattern=pattern)
        self.watch = StepWatch(config, self.log, lambda: folder, self.progress, lambda: self.now)

    def writes(self, text: str, name: str = "rank-00000.log") -> None:
        with (self.folder / name).open("a") as stream:
            stream.write(text)

    def looked_at(self) -> tuple[int, int, float | str | None]:
        """What is known once two looks have ended."""

        async def look() -> None:
            for _ in range(2):
                self.now += 10.0
                self.watch.check()
                if self.watch._reads._reading is not None:
                    await asyncio.wait([self.watch._reads._reading])

        asyncio.run(look())
        return self.progress.step, self.progress.total, self.progress.loss


def test_the_log_of_rank_0_is_read_from_this_generation_on(tmp_path: Path) -> None:
    program = Program(tmp_path)
    program.watch.start_generation(1)
    assert program.looked_at() == (0, 0, None), "there is no log yet"
    program.writes(f"{generation_mark(1)}\nstep 40/60 loss 2.5\n")
    assert program.looked_at() == (40, 60, 2.5)
    program.watch.start_generation(2)
    program.writes(f"{generation_mark(2)}\nloading\n")
    assert program.looked_at() == (40, 60, 2.5), "it has not said where it goes on"
    program.writes("step 31/60\n")
    assert program.looked_at() == (31, 60, 2.5)


def test_a_file_of_the_program_is_found_where_it_runs(tmp_path: Path) -> None:
    program = Program(tmp_path, "progress.txt")
    program.watch.start_generation(1)
    program.writes("step 3\n")
    program.writes("step 7/9\n", "progress.txt")
    assert program.looked_at() == (7, 9, None)


def test_the_last_word_is_read_when_all_has_ended(tmp_path: Path) -> None:
    program = Program(tmp_path)
    program.watch.start_generation(1)
    program.writes(f"{generation_mark(1)}\nstep 60/60\n")
    asyncio.run(program.watch.check_settled())
    assert program.progress.step == 60


def test_a_pattern_that_takes_for_ever_stops_nothing_and_is_named_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress.newest_step, "__defaults__", (0.3,))
    program = Program(tmp_path, pattern=r"(a+)+(a+)+(a+)+ step (?P<step>\d+)")
    program.watch.start_generation(1)
    program.writes(f"{generation_mark(1)}\n{'a' * 1000}\n")
    longest = 0.0

    async def look() -> None:
        nonlocal longest
        for _ in range(2):
            program.now += 100.0
            program.watch.check()  # takes the result of the last check
            program.watch.check()
            looking = program.watch._reads._reading
            before = time.monotonic()
            while not looking.done():
                await asyncio.sleep(0.01)
                longest, before = max(longest, time.monotonic() - before), time.monotonic()
        program.watch.check()
        program.now += 10.0
        program.watch.check()
        assert program.watch._reads._reading is None, "it is tried again after a minute"

    asyncio.run(look())
    assert longest < 10.0, "the event loop went on"
    (said,) = capsys.readouterr().err.splitlines()
    assert "progress.pattern=(a+)+" in said
    assert said.endswith("within 0.3 s: the step is not shown")


@pytest.mark.parametrize(
    ("path", "pattern", "why"),
    [
        ("", "step", r"must have a group \(\?P<step>"),
        ("", "(?P<step>[0-9]+) (?P<epoch>[0-9]+)", "and no groups except step, total, loss"),
        ("", "(?P<step>", "is not a regular expression"),
        ("log.txt", "", r"progress.path=log.txt: needs progress.pattern"),
    ],
)
def test_a_pattern_that_cannot_work_is_refused(path: str, pattern: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        CommandProgressConfig(path=path, pattern=pattern)
