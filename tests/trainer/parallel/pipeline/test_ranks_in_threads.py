"""Two ranks of a pipeline in two threads of one process: every schedule has the gradients of the whole model."""

import queue
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainer.costs.simulation import COMPUTES, Kind
from trainer.costs.stage_split import split_model, stages_of_rank
from trainer.models.llama import Llama
from trainer.models.pipelined_llama import LlamaStage, PipelinedLlama, stage
from trainer.parallel.apply.expert_parallel import build_expert_balance
from trainer.parallel.apply.pipeline_runtime import Pipeline, find_pipeline
from trainer.parallel.apply.pipeline_stage import Activity, Call, StageActivity, with_communication
from trainer.protocol.config import JobConfig
from trainer.protocol.config_sections.pipeline_config import PipelineConfig
from trainer.protocol.config_sections.recipe_config import ModelConfig, TrainConfig

CPU = torch.device("cpu")
RANKS, MICRO_BATCHES, SEQUENCES = 2, 4, 2
JOB = JobConfig(
    model=ModelConfig(dim=16, layers=4, heads=2, kv_heads=1, ffn_dim=16), train=TrainConfig(seq_len=8, dtype="float32")
)
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "interleaved_zero_bubble": 2, "zbv": 2}
BYTES = SEQUENCES * 8 * 16 * 4
"""Of an activation."""
COMPUTED = {
    Kind.FORWARD: Activity.FORWARD,
    Kind.BACKWARD: Activity.BACKWARD,
    Kind.INPUT_GRADIENT: Activity.INPUT_GRADIENT,
    Kind.WEIGHT_GRADIENT: Activity.WEIGHT_GRADIENT,
    Kind.REDUCE: Activity.REDUCE,
}
MESSAGES = {
    Kind.RECEIVE_ACTIVATION: Activity.WAIT_FOR_ACTIVATION,
    Kind.RECEIVE_GRADIENT: Activity.WAIT_FOR_GRADIENT,
    Kind.SEND_ACTIVATION: Activity.SEND_ACTIVATION,
    Kind.SEND_GRADIENT: Activity.SEND_GRADIENT,
}
AWAITED = {
    Activity.SEND_ACTIVATION: Activity.WAIT_FOR_SENT_ACTIVATION,
    Activity.SEND_GRADIENT: Activity.WAIT_FOR_SENT_GRADIENT,
}


Box = tuple[int, int, int]


@dataclass
class Mail:
    """What ranks send each other: the n-th that is sent is the n-th that was asked for, as gloo has it."""

    boxes: dict[Box, "queue.Queue[torch.Tensor]"] = field(default_factory=lambda: defaultdict(queue.Queue))
    numbers: dict[tuple[str, int, int], int] = field(default_factory=lambda: defaultdict(int))

    def isend(self, tensor: torch.Tensor, *, group: "Group", group_dst: int) -> "Work":
        self.boxes[self._next("sent", group.rank(), group_dst)].put(tensor.clone())
        return Work(lambda: None)

    def irecv(self, buffer: torch.Tensor, *, group: "Group", group_src: int) -> "Work":
        box = self._next("asked for", group_src, group.rank())
        return Work(lambda: buffer.copy_(self.boxes[box].get(timeout=120)))

    def _next(self, what: str, source: int, target: int) -> Box:
        self.numbers[what, source, target] += 1
        return source, target, self.numbers[what, source, target]


@dataclass
class Work:
    wait: Callable[[], Any]


@dataclass
class Group:
    number: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return RANKS


class Watch:
    """Keeps what has ended, and the most activations that were held when something began."""

    def __init__(self) -> None:
        self.moments: list[StageActivity] = []
        self.pipeline: Pipeline | None = None
        self.held = 0

    def begin_callback(self, _: StageActivity) -> Call:
        return self._look

    def _look(self) -> None:
        self.held = max(self.held, 0 if self.pipeline is None else self.pipeline.activations_held)

    def end_callback(self, moment: StageActivity) -> Call:
        return lambda: self.moments.append(moment)


@dataclass
class Rank:
    model: PipelinedLlama
    watch: Watch

    @property
    def pipeline(self) -> Pipeline:
        return self.model.pipeline


@pytest.fixture
def mail(monkeypatch: pytest.MonkeyPatch) -> Mail:
    made = Mail()
    monkeypatch.setattr(dist, "isend", made.isend)
    monkeypatch.setattr(dist, "irecv", made.irecv)
    return made


def config_of(schedule: str) -> PipelineConfig:
    return PipelineConfig(stages=RANKS * SCHEDULES[schedule], schedule=schedule)


def rank_of(schedule: str, number: int) -> Rank:
    config, group, watch = config_of(schedule), Group(number), Watch()
    parts, modules = split_model(config, JOB.model, JOB.train).parts, []
    for at in stages_of_rank(config, number):
        with torch.device("meta"):
            modules.append(LlamaStage(JOB.model, JOB.train, parts[at]))
        modules[-1].materialize(CPU, JOB.train.seed)
    stages = [stage(one, JOB.train, group, CPU, sequences=SEQUENCES) for one in modules]  # type: ignore[arg-type]
    pipeline = Pipeline(config, stages, MICRO_BATCHES)
    pipeline.watch(watch)
    watch.pipeline = pipeline
    return Rank(PipelinedLlama(modules, pipeline), watch)


def ranks_of(schedule: str) -> list[Rank]:
    return [rank_of(schedule, number) for number in range(RANKS)]


def on_all(ranks: Sequence[Rank], call: Callable[[Pipeline], torch.Tensor]) -> list[torch.Tensor]:
    with ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(lambda rank: call(rank.pipeline), ranks))


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 257, (SEQUENCES, 9), generator=generator) for _ in range(MICRO_BATCHES)]


def whole_model(factor: float = 1.0, scale: float = 1.0) -> tuple[float, dict[str, torch.Tensor]]:
    model = Llama(JOB.model, JOB.train)
    model.materialize(CPU, JOB.train.seed)
    total = torch.zeros(())
    for batch in batches():
        loss = model(batch[:, :-1], batch[:, 1:]) / MICRO_BATCHES * factor
        (loss * scale).backward()
        total += loss.detach()
    return float(total), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_and_losses_are_those_of_the_whole_model(mail: Mail, schedule: str) -> None:
    ranks = ranks_of(schedule)
    last = [rank.pipeline.has_last for rank in ranks]
    assert sum(last) == 1
    for scaling in ({}, {"factor": 2.0, "scale": 1024.0}):
        loss, expected = whole_model(**scaling)
        if not scaling:
            validated = on_all(ranks, lambda pipeline: pipeline.evaluate(batches()))
            assert [float(one) for one in validated] == [loss if is_last else 0.0 for is_last in last]
        found = on_all(ranks, lambda pipeline, scaling=scaling: pipeline.step(batches(), **scaling))  # type: ignore[misc]
        assert [float(one) for one in found] == [loss if is_last else 0.0 for is_last in last]
        names = [name for rank in ranks for name, _ in rank.model.named_parameters()]
        assert sorted(names) == sorted(expected)
        for rank in ranks:
            for name, parameter in rank.model.named_parameters():
                assert parameter.grad is not None
                assert torch.equal(parameter.grad, expected[name]), name
            rank.model.zero_grad(set_to_none=True)
    assert all(box.empty() for box in mail.boxes.values())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_watchers_see_every_action_and_waits_for_sends_at_the_end(mail: Mail, schedule: str) -> None:
    ranks = ranks_of(schedule)
    on_all(ranks, lambda pipeline: pipeline.step(batches()))
    for rank, actions in zip(ranks, with_communication(config_of(schedule), MICRO_BATCHES), strict=True):
        computed = [
            StageActivity(COMPUTED[one.kind], one.stage, one.micro_batch) for one in actions if one.kind in COMPUTED
        ]
        assert any(one.kind in COMPUTES for one in actions)
        messages = [
            StageActivity(MESSAGES[one.kind], one.stage, one.micro_batch) for one in actions if one.kind in MESSAGES
        ]
        sends = [one for one in messages if one.activity in AWAITED]
        ends = [one._replace(activity=AWAITED[one.activity]) for one in sends]
        found = rank.watch.moments
        assert [one for one in found if one.activity in COMPUTED.values()] == computed
        assert sorted(one for one in found if one in messages) == sorted(messages)
        assert found[len(found) - len(ends) :] == ends
        assert len(found) == len(computed) + len(messages) + len(ends)
        assert rank.pipeline.sent_bytes == len(sends) * BYTES


def test_activations_are_held_for_micro_batches_in_flight(mail: Mail) -> None:
    for schedule, most in {"gpipe": [0, 4], "1f1b": [0, 2]}.items():
        ranks = ranks_of(schedule)
        on_all(ranks, lambda pipeline: pipeline.step(batches()))
        assert [rank.watch.held for rank in ranks] == most
        assert [rank.pipeline.activations_held for rank in ranks] == [0, 0]


def test_what_may_not_be_sent_never_is(mail: Mail) -> None:
    (first, _) = ranks_of("1f1b")
    asked: list[int] = []
    first.pipeline.ask_before_sends(lambda: asked.append(1) or len(asked) != 2)  # type: ignore[func-returns-value]
    first.pipeline.evaluate(batches())
    assert len(asked) == MICRO_BATCHES
    assert first.pipeline.sent_bytes == (MICRO_BATCHES - 1) * BYTES
    assert len(mail.boxes) == MICRO_BATCHES - 1


def test_a_model_in_stages_knows_its_pipeline_and_its_layers() -> None:
    (_, second) = ranks_of("1f1b")
    assert find_pipeline(second.model) is second.pipeline
    assert find_pipeline(torch.nn.Linear(1, 1)) is None
    part = split_model(config_of("1f1b"), JOB.model, JOB.train).parts[1]
    assert (second.model.layer_numbers, second.model.depth) == (list(part.layers), 4)
    before = {name: one.detach().clone() for name, one in second.model.named_parameters()}
    second.model.set_initial_weights(JOB.train.seed + 1)
    changed = [name for name, one in second.model.named_parameters() if not torch.equal(one, before[name])]
    assert any(name.startswith("layers.3.") for name in changed)
    assert build_expert_balance(second.model).loads() is None
