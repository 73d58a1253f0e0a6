"""An agent's look at its ranks: when one stands still, and what excuses it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from trainer.agent.processes.proc import ProcessActivity, read_activity
from trainer.agent.rank_processes.local_ranks import LocalRanks
from trainer.agent.watch.hang_limits import Limits, RankSample
from trainer.agent.watch.sampling import AnswerTimes, JobSnapshot, Sampler
from trainer.protocol.config_sections.fault_detection_config import HangConfig
from trainer.protocol.messages.agents import FROM_AGENT, ProgressReport
from trainer.protocol.messages.codec import MessageError, encode
from trainer.protocol.rank_progress.progress import Activity, Phase, SentMessages, StageActivity

NOTHING = ProgressReport(generation=1)


class Host:
    """Two ranks, a clock, and what /proc says of them; `children` and `writers` have work and bytes of their own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.cpu, self.bytes, self.state = 0.0, 0, "S"
        self.answered = self.starved = 0.0  # of the CPU time: what answers to the agent's questions took
        self.looked = self.passed = 0
        self.children: dict[int, list[int]] = {}  # of a rank's process
        self.writers: dict[int, int] = {}
        self.others: dict[int, ProcessActivity] = {}
        self.ranks = LocalRanks(1, range(2))
        for rank, local in self.ranks.by_rank.items():
            local.pid = 1000 + rank
        self.sampler = Sampler(
            self.ranks, "n1", self.writers.get, clock=lambda: self.now, signs=self.look, groups=self.members,
            answers=lambda pid: self.answered,
        )  # fmt: skip

    def members(self, groups: Collection[int]) -> dict[int, list[int]]:
        self.passed += 1
        return {group: [group, *self.children.get(group, ())] for group in groups}

    def look(self, pid: int) -> ProcessActivity | None:
        self.looked += 1
        if pid < 1000:
            return self.others.get(pid)
        return ProcessActivity(self.state, self.cpu, self.bytes, self.starved)

    def passes(self, seconds: float, *, cpu: float = 0.0, read: int = 0, starved: float = 0.0) -> None:
        for _ in range(int(seconds * 10)):
            self.now += 0.1
            self.cpu += cpu * 0.1
            self.starved += starved * 0.1
            self.bytes += int(read * 0.1)
            self.sampler.samples()

    def works(self, pid: int, seconds: float, *, cpu: float = 0.0, read: int = 0) -> None:
        """Time in which only this process, no rank, does something."""
        for _ in range(int(seconds * 10)):
            was = self.others.get(pid, ProcessActivity("S", 0.0, 0))
            self.others[pid] = ProcessActivity("S", was.cpu_seconds + cpu * 0.1, was.io_bytes + int(read * 0.1))
            self.passes(0.1)

    def moves(self, rank: int, monkeypatch: pytest.MonkeyPatch, phase: Phase = Phase.FORWARD) -> None:
        monkeypatch.setattr("time.monotonic_ns", lambda: int(self.now * 1e9))
        self.ranks.by_rank[rank].cell.enter(phase)


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    for local in made.ranks.by_rank.values():
        assert local.theirs is not None
        local.theirs.close()
    made.ranks.close()


def of(host: Host, rank: int) -> RankSample:
    return host.sampler.samples()[rank]


def test_a_rank_that_moves_is_young_and_proc_is_left_alone(host, monkeypatch) -> None:
    for _ in range(20):
        host.now += 0.1
        host.moves(0, monkeypatch)
        host.moves(1, monkeypatch)
        assert of(host, 0).age == pytest.approx(0.0, abs=1e-6)
    assert (host.looked, host.passed) == (0, 0)


def test_all_that_stand_still_are_looked_at_together_twice_a_second(host, monkeypatch) -> None:
    for rank in (0, 1):
        host.moves(rank, monkeypatch)
    host.passes(6)
    assert 8 <= host.passed <= 10
    assert host.looked == 2 * host.passed


def test_before_its_first_write_a_rank_is_as_old_as_its_generation(host) -> None:
    host.passes(3)
    assert of(host, 0).age == pytest.approx(3.0)
    assert of(host, 0).first


def test_a_still_rank_without_signs_of_life_grows_old_in_both_ways(host, monkeypatch) -> None:
    host.moves(0, monkeypatch)
    host.passes(5)
    seen = of(host, 0)
    assert (seen.age, seen.alive, seen.state) == (pytest.approx(5.0), pytest.approx(5.0), "S")


@pytest.mark.parametrize("life", [{"cpu": 0.5}, {"read": 100_000}])
def test_work_and_bytes_are_signs_of_life(host, monkeypatch, life) -> None:
    host.moves(0, monkeypatch)
    host.passes(5, **life)
    seen = of(host, 0)
    assert seen.age == pytest.approx(5.0)
    assert seen.alive < 1.0


def test_what_the_agent_has_asked_for_is_none(host, monkeypatch) -> None:
    host.moves(0, monkeypatch, Phase.DATA)
    for _ in range(3):  # every four seconds it is asked for its flight record
        host.passes(4)
        host.cpu += 0.06
        host.answered += 0.06
    stacks = host.ranks.by_rank[0].stacks
    for size in (9000, 30_000):  # a person looks at its stacks, twice
        os.ftruncate(stacks, 0)
        host.bytes += os.pwrite(stacks, bytes(size), 0)
        host.passes(2)
    assert of(host, 0).alive == pytest.approx(16.0)


def test_a_rank_that_gets_no_core_is_alive_and_one_that_waits_a_moment_for_it_is_not(host, monkeypatch) -> None:
    host.moves(0, monkeypatch, Phase.DATA)
    host.passes(5, cpu=0.02, starved=0.2)
    assert of(host, 0).alive == pytest.approx(5.0)
    host.passes(5, cpu=0.02, starved=0.9)
    assert of(host, 0).alive < 1.0


def test_waking_up_now_and_then_is_none(host, monkeypatch) -> None:
    host.moves(0, monkeypatch)
    host.passes(5, cpu=0.01, read=500)
    assert of(host, 0).alive == pytest.approx(5.0)


@pytest.mark.parametrize("life", [{"cpu": 0.5}, {"read": 100_000}])
@pytest.mark.parametrize("phase", [Phase.DATA, Phase.CHECKPOINT, Phase.COMPILE])
def test_a_rank_whose_child_works_is_alive(host, monkeypatch, life, phase) -> None:
    host.children[1000] = [7]
    for rank in (0, 1):
        host.moves(rank, monkeypatch, phase)
    host.works(7, 5, **life)
    assert of(host, 0).age == pytest.approx(5.0)
    assert of(host, 0).alive < 1.0
    assert of(host, 1).alive == pytest.approx(5.0)  # it is not its child


def test_idle_children_and_an_idle_writer_excuse_nobody(host, monkeypatch) -> None:
    host.children[1000], host.writers[0] = [7], 8
    host.moves(0, monkeypatch, Phase.CHECKPOINT)
    host.works(8, 0.1)
    host.works(7, 5, cpu=0.02, read=2000)
    assert of(host, 0).alive == pytest.approx(5.1)


def test_children_count_together(host, monkeypatch) -> None:
    host.children[1000] = [7, 8]
    host.moves(0, monkeypatch, Phase.DATA)
    for _ in range(50):
        host.others[8] = ProcessActivity("S", host.others[8].cpu_seconds + 0.003 if 8 in host.others else 0.0, 0)
        host.works(7, 0.1, cpu=0.03)
    assert of(host, 0).alive < 1.0


def test_a_child_that_ends_takes_nothing_away_and_its_end_is_no_work(host, monkeypatch) -> None:
    host.children[1000], host.others[7] = [7, 8], ProcessActivity("S", 900.0, 10**9)
    host.moves(0, monkeypatch, Phase.DATA)
    host.works(8, 3, cpu=0.5)
    del host.others[7]
    host.children[1000] = [8]
    host.works(8, 2, cpu=0.5)
    assert of(host, 0).alive < 1.0
    host.works(8, 3)
    assert of(host, 0).alive == pytest.approx(3.0, abs=0.6)


def test_a_pid_that_comes_back_with_less_takes_nothing_from_the_others(host, monkeypatch) -> None:
    host.children[1000] = [7, 8]
    host.moves(0, monkeypatch, Phase.DATA)
    for used in range(50, 0, -1):
        host.others[7] = ProcessActivity("S", used * 10.0, used * 10**6)
        host.works(8, 0.1, cpu=0.5)
    assert of(host, 0).alive < 1.0


def test_one_child_after_the_other_is_work(host, monkeypatch) -> None:
    host.moves(0, monkeypatch, Phase.DATA)
    host.passes(2)
    for pid in range(100, 110):
        host.children[1000] = [pid]
        host.works(pid, 0.5, cpu=0.5)
    assert of(host, 0).alive < 1.0


def test_a_rank_waits_for_its_writer_in_a_save_and_in_no_phase_of_a_step(host, monkeypatch) -> None:
    host.writers.update({0: 7, 1: 7})
    host.moves(0, monkeypatch, Phase.CHECKPOINT)
    host.moves(1, monkeypatch, Phase.FORWARD)
    host.works(7, 5, read=10**6)
    assert of(host, 0).alive < 1.0
    assert of(host, 1).alive == pytest.approx(5.0)


def test_neither_children_nor_an_old_save_excuse_a_stopped_rank(host, monkeypatch) -> None:
    host.children[1000], host.writers[0] = [7], 8
    host.moves(0, monkeypatch, Phase.CHECKPOINT)
    host.works(8, 3, read=10**6)
    host.state = "T"
    host.works(7, 3, cpu=1.0)
    host.works(8, 3, read=10**6)
    seen = of(host, 0)
    assert seen.state == "T"
    assert seen.alive == pytest.approx(6.0, abs=0.6)
    allowed = Limits(HangConfig(), {}).for_rank(seen)
    assert allowed.seconds < seen.age, allowed.words
    host.passes(1)
    host.state = "S"
    host.passes(1)
    assert of(host, 0).alive > 6.0  # what they did meanwhile is not found out later


ANSWERS = """
import threading
def answer():
    with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as name:
        name.write("pt_workerserver")
    print("named", flush=True)
    while True: pass
threading.Thread(target=answer, daemon=True).start()
threading.Event().wait()
"""


def test_the_time_of_torchs_answering_threads_is_told_from_the_rest(tmp_path) -> None:
    with process(ANSWERS, tmp_path) as pid:
        answers, deadline = AnswerTimes(), time.monotonic() + 60.0
        while not answers(pid):  # the thread bears its name
            assert time.monotonic() < deadline
            time.sleep(0.01)
        since = -answers(pid) + cpu_of(pid)
        begun = cpu_of(pid)
        while cpu_of(pid) < begun + 0.5:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert cpu_of(pid) - answers(pid) - since < 0.1


def cpu_of(pid: int) -> float:
    signs = read_activity(pid)
    assert signs is not None
    return signs.cpu_seconds


SPIN, REST = "while True: pass", "import time; time.sleep(60)"
WRITE = "import time\nwhile True: os.write(file, bytes(100_000)); time.sleep(0.2)"


@contextmanager
def process(program: str, folder: Path) -> Iterator[int]:
    """The pid of a process that leads its group and has begun."""
    ready = f"import os; file = os.open({str(folder / 'file')!r}, 66, 0o600); print('on', flush=True)\n{program}"
    with subprocess.Popen([sys.executable, "-c", ready], stdout=subprocess.PIPE, process_group=0) as started:
        assert started.stdout.readline() == b"on\n"
        try:
            yield started.pid
        finally:
            os.killpg(started.pid, signal.SIGKILL)


@pytest.mark.multi
def test_the_work_of_real_children_and_writers_is_seen_and_their_rest_is_none(tmp_path) -> None:
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPIN!r}])"
    ranks = LocalRanks(1, range(4))
    expected = [(False, "S"), (True, "S"), (True, "S"), (False, "S")]
    with ExitStack() as stack:
        pids = [stack.enter_context(process(program, tmp_path)) for program in (REST, parent, REST, REST)]
        writers = {rank: stack.enter_context(process(program, tmp_path)) for rank, program in ((2, WRITE), (3, REST))}
        for rank, local in ranks.by_rank.items():
            local.pid = pids[rank]
            local.cell.enter(Phase.CHECKPOINT)
        sampler = Sampler(ranks, "n1", writers.get)
        end, seen = time.monotonic() + 60.0, []
        # On a busy machine what works may get nothing for seconds: asked again until the difference shows.
        while [(one.alive < 1.5, one.state) for one in seen] != expected and time.monotonic() < end:
            time.sleep(0.1)
            seen = sampler.samples()
    assert [(one.alive < 1.5, one.state) for one in seen] == expected
    for local in ranks.by_rank.values():
        assert local.theirs is not None
        local.theirs.close()
    ranks.close()


def test_a_stopped_process_is_seen_within_two_seconds(host, monkeypatch) -> None:
    host.moves(0, monkeypatch)
    host.state = "T"
    host.passes(2)
    assert of(host, 0).state == "T"


def test_only_news_is_reported_and_stillness_is_news(host, monkeypatch) -> None:
    for rank in (0, 1):
        host.moves(rank, monkeypatch)
    assert [row[0] for row in host.sampler.report(NOTHING).samples] == [0, 1]
    host.now += 0.2
    host.moves(1, monkeypatch)
    assert [row[0] for row in host.sampler.report(NOTHING).samples] == [1]
    assert host.sampler.report(NOTHING) == NOTHING
    host.now += 2.0
    assert [row[0] for row in host.sampler.report(NOTHING).samples] == [0, 1]


def test_what_a_rank_of_a_pipeline_does_reaches_the_coordinator(host, monkeypatch) -> None:
    monkeypatch.setattr("time.monotonic_ns", lambda: int(host.now * 1e9))
    cell, waits = host.ranks.by_rank[1].cell, StageActivity(Activity.WAIT_FOR_GRADIENT, 0, 3)
    cell.update(step=7)
    cell.begin_passes(1)
    cell.record_sent(0, False, 3)
    cell.begin_moment(waits)
    scene = JobSnapshot(0.0, world=2)
    scene.add_report(FROM_AGENT.decode(json.loads(encode(host.sampler.report(NOTHING)))), "n1", 100.0)
    plain, staged = scene.at(105.0)
    assert (plain.moment, plain.sent, plain.waits_for_message) == (None, None, False)
    assert (staged.moment, staged.waits_for_message) == (waits, True)
    assert staged.sent == SentMessages(after_step=7, activations=(4,), gradients=(0,))


def test_an_end_is_reported_once(host, monkeypatch) -> None:
    host.moves(0, monkeypatch)
    host.moves(1, monkeypatch)
    host.sampler.report(NOTHING)
    host.ranks.by_rank[1].ended = True
    (row,) = host.sampler.report(NOTHING).samples
    assert RankSample.from_row(row, "n1").ended
    host.now += 10
    assert [row[0] for row in host.sampler.report(NOTHING).samples] == [0]


def test_percentiles_and_work_are_reported_when_they_change(host, monkeypatch) -> None:
    cell = host.ranks.by_rank[0].cell
    cell.start_timing()
    host.moves(0, monkeypatch, Phase.FORWARD)
    host.now += 0.5
    host.moves(0, monkeypatch, Phase.BACKWARD)
    cell.record_work(10, [1, 2, 3, 4])
    report = host.sampler.report(NOTHING)
    assert 0.5 <= report.p99["forward"] < 0.75
    assert report.work == ((0, 10, 1, 2, 3, 4),)
    assert host.sampler.report(NOTHING) == NOTHING


def test_the_coordinator_makes_what_it_heard_as_old_as_it_is() -> None:
    scene = JobSnapshot(50.0, 8)
    row = RankSample(rank=3, node="", age=2.0, alive=1.0, phase="data").to_row()
    scene.add_report(ProgressReport(generation=1, samples=(row,)), "n2", 60.0)
    assert scene.moved == 58.0
    (seen,) = scene.at(65.0)
    assert (seen.rank, seen.node, seen.age, seen.alive, seen.lock) == (3, "n2", 7.0, 6.0, 0.0)


def test_the_slowest_node_counts_and_may_become_faster() -> None:
    scene = JobSnapshot(0.0, 8)
    scene.add_report(ProgressReport(generation=1, p99={"forward": 2.0}), "n1", 1.0)
    scene.add_report(ProgressReport(generation=1, p99={"forward": 1.0}), "n2", 1.0)
    assert scene.p99() == {"forward": 2.0}
    scene.add_report(ProgressReport(generation=1, p99={"forward": 0.5}), "n1", 2.0)
    assert scene.p99() == {"forward": 1.0}


ROW = RankSample(rank=1, node="").to_row()


@pytest.mark.parametrize("row", [[1, 2], {}, None, [*ROW, 1], ["1", *ROW[1:]], [*ROW[:2], 3, *ROW[3:]],
                                 [*ROW[:5], None, *ROW[6:]], [*ROW[:-1], 1]])  # fmt: skip
def test_what_is_no_sample_is_refused_where_it_is_read(row) -> None:
    with pytest.raises(MessageError, match="a 'progress_report' whose samples is"):
        FROM_AGENT.decode({"say": "progress_report", "generation": 1, "samples": [row]})


@pytest.mark.parametrize("row", [(9, *ROW[1:]), (-1, *ROW[1:]), (*ROW[:5], -1.0, *ROW[6:])])
def test_a_sample_of_no_rank_or_of_the_future_is_refused(row) -> None:
    scene = JobSnapshot(0.0, 8)
    with pytest.raises(ValueError, match="rank"):
        scene.add_report(ProgressReport(generation=1, samples=(row,)), "n1", 1.0)
    assert not len(scene)
