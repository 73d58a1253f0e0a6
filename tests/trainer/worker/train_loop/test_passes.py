"""Forward and backward passes: each rank's contribution to the mean loss."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

from trainer.parallel.apply.pipeline_stage import Watcher
from trainer.protocol.config_sections.fault_detection_config import DrillEvent
from trainer.protocol.rank_progress.progress import Phase
from trainer.worker.train_loop.drill import Drill
from trainer.worker.train_loop.passes import StagedPasses, WholePasses, on_device, require_batches
from trainer.worker.workload import WorkloadError

CPU = torch.device("cpu")
STAGES = 2


class Phases:
    def __init__(self) -> None:
        self.told: list[Any] = []

    def enter(self, phase: Phase) -> None:
        self.told.append(phase)

    def begin_passes(self, stages: int) -> None:
        self.told.append(stages)


class Gradients:
    def __init__(self) -> None:
        self.last: list[bool] = []
        self.made_by: list[str] = []
        self.reduced = 0

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        self.made_by.append(loss.grad_fn.name() if loss.grad_fn else "")
        loss.backward()
        self.last.append(is_last)

    def reduce_now(self) -> None:
        self.reduced += 1


class OneStage:
    def __init__(self, number: int) -> None:
        self.stages, self.has_last = [SimpleNamespace(stage_index=number)], number == STAGES - 1
        self.watchers: list[Watcher] = []
        self.may_send = lambda: True
        self.asked: list[dict[str, float]] = []

    def ask_before_sends(self, may_send: Any) -> None:
        self.may_send = may_send

    def watch(self, watcher: Watcher) -> None:
        self.watchers.append(watcher)

    def step(self, batches: list[torch.Tensor], *, factor: float, scale: float) -> torch.Tensor:
        self.asked.append({"factor": factor, "scale": scale, "sends": self.may_send()})
        return torch.tensor(3.0 * factor if self.has_last else 0.0)


def drill(*events: DrillEvent) -> Drill:
    return Drill(events, rank=0, attempt=1, generation=1, announce=lambda kind, step: None)


def objects(**more: Any) -> Any:
    return SimpleNamespace(layout=SimpleNamespace(device=CPU, sizes={"pp": STAGES}), data=SimpleNamespace(), **more)


def staged(number: int, *events: DrillEvent) -> tuple[StagedPasses, OneStage, Phases, Gradients]:
    pipeline, phases, gradients = OneStage(number), Phases(), Gradients()
    made: Any = StagedPasses(objects(), phases, drill(*events), gradients, pipeline)  # type: ignore[arg-type]
    return made, pipeline, phases, gradients


def test_the_mean_over_the_ranks_of_a_pipeline_is_the_loss_of_its_last_stage() -> None:
    losses = [staged(number)[0].run(1, [torch.ones(1)], 1.0) for number in range(STAGES)]
    assert float(sum(losses)) / STAGES == 3.0


def test_a_stage_reduces_once_and_passes_the_scale_on() -> None:
    passes, pipeline, phases, gradients = staged(1)
    passes.run(4, [torch.ones(1)] * 2, 8.0)
    assert pipeline.asked == [{"factor": 1.0, "scale": 8.0, "sends": True}]
    assert gradients.reduced == 1
    assert phases.told == [1, Phase.FORWARD, Phase.BACKWARD]
    assert len(pipeline.watchers) == 2


@pytest.mark.parametrize(("kind", "loss"), [("spike", 1000.0), ("nan", float("nan"))])
def test_a_drill_spoils_the_loss_of_all_stages(kind: str, loss: float) -> None:
    spoiled = DrillEvent(kind=kind, rank=0, step=2)
    for number in range(STAGES):
        passes, pipeline, *_ = staged(number, spoiled)
        calm, bad = passes.run(1, [torch.ones(1)], 1.0), passes.run(2, [torch.ones(1)], 1.0)
        assert pipeline.asked[0]["factor"] == 1.0
        assert pipeline.asked[1]["factor"] == pytest.approx(loss, nan_ok=True)
        assert torch.isnan(bad) if kind == "nan" else bad > calm + 100


def test_a_send_is_left_out_in_its_step_alone() -> None:
    passes, pipeline, *_ = staged(0, DrillEvent(kind="skip-send", rank=0, step=2))
    for step in (1, 2, 3):
        passes.run(step, [torch.ones(1)], 1.0)
    assert [one["sends"] for one in pipeline.asked] == [True, False, True]
    assert pipeline.may_send(), "an evaluation is no part of a step"


def test_what_nothing_hid_is_that_of_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = MagicMock()
    meter.take.return_value = SimpleNamespace(waited={0: 1.0, 1: 2.0}, sends=4.0, reductions=5.0)
    monkeypatch.setattr("trainer.worker.train_loop.passes.BubbleMeter", lambda clock: meter)
    passes, *_ = staged(1)
    passes.run(1, [torch.ones(1)], 1.0)
    assert passes.exposed == {"receives": 0.0, "sends": 0.0, "reductions": 0.0}
    passes.run(2, [torch.ones(1)], 1.0)
    assert passes.exposed == {"receives": 3.0, "sends": 4.0, "reductions": 5.0}
    assert meter.start.call_count == 2


def test_a_model_in_one_piece_has_the_mean_of_its_micro_batches() -> None:
    weight = torch.ones((), requires_grad=True)
    gradients, phases = Gradients(), Phases()
    given = objects(workload=SimpleNamespace(loss=lambda model, batch: model * batch), model=weight)
    whole: Any = WholePasses(given, phases, drill(), gradients)  # type: ignore[arg-type]
    assert float(whole.run(1, [torch.tensor(2.0), torch.tensor(4.0)], 8.0)) == 3.0
    assert (gradients.last, float(weight.grad)) == ([False, True], 24.0)  # type: ignore[arg-type]
    assert phases.told == [Phase.FORWARD, Phase.BACKWARD] * 2
    assert not whole.exposed


@pytest.mark.parametrize(("scale", "made_by"), [(1.0, "DivBackward0"), (8.0, "MulBackward0")])
def test_a_loss_without_drill_and_scale_is_not_multiplied(scale: float, made_by: str) -> None:
    gradients = Gradients()
    weight = torch.ones((), requires_grad=True)
    given = objects(workload=SimpleNamespace(loss=lambda model, batch: model * batch), model=weight)
    whole: Any = WholePasses(given, Phases(), drill(), gradients)  # type: ignore[arg-type]
    whole.run(1, [torch.tensor(2.0)], scale)
    assert gradients.made_by == [made_by]


def test_a_drill_spoils_the_loss_and_the_gradients_of_its_step() -> None:
    weight = torch.ones((), requires_grad=True)
    given = objects(workload=SimpleNamespace(loss=lambda model, batch: model * batch), model=weight)
    spoiled = drill(DrillEvent(kind="spike", rank=0, step=2))
    whole: Any = WholePasses(given, Phases(), spoiled, Gradients())  # type: ignore[arg-type]
    assert float(whole.run(1, [torch.tensor(2.0)], 1.0)) == 2.0
    assert float(whole.run(2, [torch.tensor(2.0)], 1.0)) == 2000.0
    assert float(weight.grad) == 2002.0  # type: ignore[arg-type]


def test_every_rank_needs_a_micro_batch() -> None:
    with pytest.raises(
        WorkloadError, match=r"^SimpleNamespace.take\(\) returned no micro-batch for step 7: every rank"
    ):
        require_batches(objects(), 7, [])
    with pytest.raises(WorkloadError, match="returned a generator: it must return a list"):
        require_batches(objects(), 7, (batch for batch in [torch.ones(1)]))  # type: ignore[arg-type]
    require_batches(objects(), 7, [torch.ones(1)])


def test_a_batch_is_moved_to_the_device_of_the_rank() -> None:
    packed = pack_padded_sequence(torch.ones(2, 3, 1), torch.tensor([3, 2]), batch_first=True)
    x, gpu = torch.ones(2), torch.device("meta")
    moved = on_device({"x": x, "more": [(x, "label"), packed], "number": 3}, gpu)
    assert moved["x"].device == moved["more"][0][0].device == moved["more"][1].data.device == gpu
    assert moved["more"][0][1] == "label"
    assert moved["number"] == 3
    assert moved["more"][1].batch_sizes.device == CPU
    batch = [x]
    assert on_device(batch, CPU) is batch
