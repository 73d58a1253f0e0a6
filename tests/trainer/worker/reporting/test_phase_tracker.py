"""Phases and own work in the progress cell, on the CPU and with a fake GPU stream."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from tests.trainer.worker.set_clock import SetClock
from trainer.parallel.apply.layer_wrappers import compile_forward, is_compiled
from trainer.protocol.rank_progress.progress import SECTIONS, Activity, Phase, ProgressCell, StageActivity
from trainer.worker.reporting import work_timer
from trainer.worker.reporting.phase_tracker import PhaseTracker, phase_tracker
from trainer.worker.reporting.work_timer import CpuStopwatch, CudaStopwatch, WaitMeter, exclude_fsdp_waits
from trainer.worker.workload import evaluating

DATA, FORWARD, BACKWARD, OPTIMIZER = range(4)


@pytest.fixture
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def cell():
    made = ProgressCell.create()
    yield made
    made.close()


class Clock:
    counts_waits = True

    def __init__(self) -> None:
        self.turns: list[int | None] = []
        self.known = [0, 0, 0, 0]

    def switch_to(self, section: int | None) -> None:
        self.turns.append(section)

    def total(self) -> list[int]:
        return self.known


def test_every_phase_is_told_with_the_collectives_begun_so_far(world, cell):
    taken = PhaseTracker(cell, Clock())
    taken.enter(Phase.DATA)
    before = cell.read().collective
    for _ in range(3):
        dist.all_reduce(torch.zeros(1))
    taken.enter(Phase.OPTIMIZER)
    reading = cell.read()
    assert (reading.phase, reading.collective - before) == (Phase.OPTIMIZER, 3)


def test_messages_are_told_within_a_phase_and_count_as_collectives_do(world, cell):
    taken = PhaseTracker(cell, Clock())
    taken.enter(Phase.FORWARD)
    before = cell.read()
    taken.count_message()
    reading = cell.read()
    assert (reading.phase, reading.phase_at) == (Phase.FORWARD, before.phase_at)
    assert (reading.collective - before.collective, reading.moved_at > before.moved_at) == (1, True)
    taken.enter(Phase.BACKWARD)
    assert cell.read().collective == reading.collective


def test_a_wait_in_a_ring_is_told_and_then_what_it_interrupted(world, cell):
    taken = PhaseTracker(cell, Clock())
    taken.enter(Phase.FORWARD, StageActivity(Activity.FORWARD, 1, 2))
    with taken.show_ring_wait(3):
        assert cell.read().moment == StageActivity(Activity.WAIT_IN_RING, 3, -1)
    assert cell.read().moment == StageActivity(Activity.FORWARD, 1, 2)
    taken.enter(Phase.FORWARD)
    with taken.show_ring_wait(3):
        assert cell.read().phase == Phase.FORWARD
    assert cell.read().moment is None


def test_the_first_forward_pass_of_a_compiled_model_is_called_so(world, cell):
    taken = PhaseTracker(cell, Clock(), compiles=True)
    phases = []
    for phase in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.FORWARD):
        taken.enter(phase)
        phases.append(cell.read().phase)
    assert phases == [Phase.DATA, Phase.COMPILE, Phase.BACKWARD, Phase.FORWARD]


def test_an_evaluation_within_a_phase_is_told_and_is_no_work_of_the_step(world, cell):
    clock = Clock()
    made = phase_tracker(cell, nn.Linear(2, 2), torch.device("cpu"))
    made._stopwatch = clock
    made.enter(Phase.FORWARD)
    with evaluating():
        with evaluating():
            assert cell.read().phase == Phase.EVAL
        assert cell.read().phase == Phase.EVAL
    assert cell.read().phase == Phase.FORWARD
    assert clock.turns == [FORWARD, None, FORWARD]


def test_outside_a_rank_an_evaluation_is_just_done(monkeypatch):
    monkeypatch.setattr("trainer.worker.reporting.phase_tracker._current", [])
    with evaluating():
        pass


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it loads its compiler
def test_a_shape_that_is_new_is_compiled_in_any_step(world, cell):
    phases = []

    def backend(graph, _):
        phases.append(cell.read().phase)
        return graph.forward

    model = torch.compile(nn.Linear(2, 2), backend=backend, dynamic=False)
    made = phase_tracker(cell, model, torch.device("cpu"))
    for batch in (1, 3):
        made.enter(Phase.FORWARD)
        model(torch.ones(batch, 2))
        made.enter(Phase.BACKWARD)
    assert phases == [Phase.COMPILE, Phase.COMPILE]
    made.enter(Phase.FORWARD)
    model(torch.ones(1, 2))
    assert (cell.read().phase, len(phases)) == (Phase.FORWARD, 2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it loads its compiler
def test_a_model_is_compiled_as_a_whole_or_in_part():
    assert not is_compiled(nn.Sequential(nn.Linear(2, 2)))
    part = nn.Linear(2, 2)
    part.compile()
    assert is_compiled(nn.Sequential(part))
    assert is_compiled(torch.compile(nn.Linear(2, 2)))
    own = nn.Linear(2, 2)
    compile_forward(own)
    assert is_compiled(nn.Sequential(own))


def test_own_work_is_told_once_a_step_and_the_first_step_is_left_out(world, cell):
    clock = Clock()
    taken = PhaseTracker(cell, clock)
    clock.known = [900, 800, 700, 600]
    taken.step_ended(101)
    assert (cell.work().steps, cell.work().sections) == (101, (0, 0, 0, 0))
    clock.known = [901, 802, 703, 604]
    taken.step_ended(102)
    assert (cell.work().steps, cell.work().sections) == (102, (1, 2, 3, 4))


def test_phase_times_count_from_the_second_step_on(world, cell):
    taken = PhaseTracker(cell, Clock())
    taken.enter(Phase.DATA)
    taken.enter(Phase.FORWARD)
    assert cell.times() == {}
    taken.step_ended(1)
    taken.enter(Phase.DATA)
    taken.enter(Phase.FORWARD)
    assert {phase: sum(counts) for phase, counts in cell.times().items()} == {Phase.DATA: 1, Phase.FORWARD: 1}


def test_a_pause_is_no_work_of_the_section_that_goes_on_after_it(world, cell):
    clock = Clock()
    taken = PhaseTracker(cell, clock)
    taken.enter(Phase.OPTIMIZER)
    taken.pause()
    taken.resume()
    taken.enter(Phase.CHECKPOINT)
    assert clock.turns == [OPTIMIZER, None, OPTIMIZER, None]


def test_waits_for_peers_are_measured_and_told_a_step_later(world, cell):
    time = SetClock()
    taken = PhaseTracker(cell, Clock(), waits=WaitMeter(time))

    def step(*waits: float) -> float:
        for seconds in waits:
            taken.enter(Phase.OPTIMIZER)
            time.now += 100.0  # work
            taken.begin_wait()
            time.now += seconds
        taken.pause()
        time.now += 0.0
        taken.resume()
        time.now += 1000.0
        taken.step_ended(1)
        return taken.reductions

    assert [step(1.0, 2.0), step(5.0), step(), step()] == [0.0, 3.0, 5.0, 0.0]


def test_a_wait_ends_with_the_next_phase(world, cell):
    time = SetClock()
    taken = PhaseTracker(cell, Clock(), waits=WaitMeter(time))
    taken.begin_wait()
    time.now += 2.0
    taken.enter(Phase.OPTIMIZER)
    time.now += 50.0
    taken.step_ended(1)
    taken.step_ended(2)
    assert taken.reductions == 2.0


def spin(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_who_waits_does_no_work_but_for_data():
    watch = CpuStopwatch()
    for section in (DATA, FORWARD, BACKWARD):
        watch.switch_to(section)
        time.sleep(0.03)
    spin(0.02)
    watch.switch_to(None)
    spin(0.01)
    watch.switch_to(None)
    data, forward, backward, optimizer = watch.total()
    assert data >= 30e6
    assert forward < 10e6
    assert 20e6 <= backward < 29e6
    assert optimizer == 0


class Stream:
    def __init__(self) -> None:
        self.queued, self.done = 0.0, 0.0

    def event(self) -> "Event":
        return Event(self)


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.at = stream, -1.0

    def record(self) -> None:
        self.at = self.stream.queued

    def query(self) -> bool:
        return self.stream.done >= self.at

    def elapsed_time(self, end: "Event") -> float:
        return end.at - self.at


def test_time_in_a_stream_is_read_when_it_has_come_to_pass():
    stream = Stream()
    watch = CudaStopwatch(stream.event)
    for section, milliseconds in ((DATA, 0), (FORWARD, 5), (None, 100), (FORWARD, 2), (BACKWARD, 9), (None, 50)):
        watch.switch_to(section)
        stream.queued += milliseconds
    watch.switch_to(OPTIMIZER)
    assert watch.total()[1:] == [0, 0, 0]
    stream.done = 107.0
    assert watch.total()[1:] == [7_000_000, 0, 0]
    stream.done = 116.0
    assert watch.total()[1:] == [7_000_000, 9_000_000, 0]


def test_loading_data_counts_by_the_clock_on_a_gpu_too():
    watch = CudaStopwatch(Stream().event)
    watch.switch_to(DATA)
    time.sleep(0.02)
    watch.switch_to(FORWARD)
    assert watch.total()[DATA] >= 20e6


def test_every_wait_for_gathered_parameters_lies_in_a_pause(world, monkeypatch):
    story: list[str] = []

    def told(name: str, call: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            story.append(name)
            return call(*args, **kwargs)

        return wrapped

    from torch.distributed.fsdp._fully_shard import _fsdp_param_group, _fsdp_state

    group = _fsdp_param_group.FSDPParamGroup
    monkeypatch.setattr(group, "wait_for_unshard", told("wait", group.wait_for_unshard))
    state = _fsdp_state.FSDPState
    final = told("last wait", state._root_post_backward_final_callback)
    monkeypatch.setattr(state, "_root_post_backward_final_callback", final)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = dist.init_device_mesh("cpu", (1,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert isinstance(model, FSDPModule)
    exclude_fsdp_waits(model, lambda: story.append("pause"), lambda: story.append("resume"))
    model(torch.ones(1, 4)).sum().backward()
    assert {"wait", "last wait"} <= set(story)
    running = True
    for what in story:
        running = {"pause": False, "resume": True}.get(what, running)
        assert "wait" not in what or not running, story
    assert "resume" not in story[story.index("last wait") :]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_events_of_a_real_gpu():
    watch = work_timer.stopwatch(torch.device("cuda"))
    watch.switch_to(FORWARD)
    torch.cuda._sleep(20_000_000)
    watch.switch_to(None)
    torch.cuda.synchronize()
    assert watch.total()[FORWARD] > 1e6


def test_it_costs_a_few_microseconds_a_step(world, cell):
    taken = PhaseTracker(cell, CpuStopwatch())
    began = time.thread_time()
    for step in range(2000):
        for phase in SECTIONS:
            taken.enter(phase)
        taken.pause()
        taken.resume()
        taken.step_ended(step)
    assert (time.thread_time() - began) / 2000 < 500e-6
