"""Step boundaries of the loop, on one rank in this process."""

import math
import pydoc
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpointing.errors import SaveFailed
from tests.trainer.worker.my_workload import Overflows, Plane
from tests.trainer.worker.train_loop.one_rank import VALIDATED, KeptSaves, OneRank, ask, workload_of
from trainer.protocol.events import EventKind
from trainer.protocol.failures.outcome import ExitCode
from trainer.protocol.rank_progress.progress import Phase, StopReason
from trainer.protocol.user_code.code_record import CodeRecord
from trainer.worker.reporting.phase_tracker import PhaseTracker
from trainer.worker.train_loop import reduction
from trainer.worker.train_loop.drill import DrillError
from trainer.worker.train_loop.reduction import Reduced
from trainer.worker.train_loop.spikes import BadStep, LossSpike
from trainer.worker.workload import WorkloadError

MakeRank = Callable[..., OneRank]
HERE = "tests.trainer.worker.train_loop.test_loop_of_one_rank"


def own(name: str, **args: object) -> dict[str, object]:
    return workload_of(HERE, name, **args)


def test_the_experts_biases_stay_where_they_are_in_a_step_that_float16_could_not_hold(
    one_rank: MakeRank, text_tokens: Path
) -> None:
    run = one_rank(
        workload={"target": "trainer.models.built_in:LlamaWorkload", "args": {}}, data={"path": str(text_tokens)},
        model={"experts": {"count": 4, "per_token": 2, "ffn_dim": 16}}, train={"dtype": "float16", "steps": 6},
        checkpoint={"every": 1}, drill={"events": [{"kind": "spike", "rank": 0, "step": 4}]},
    )  # fmt: skip
    assert run.train() == ExitCode.FINISHED
    lines, moves = run.lines(), {}
    for step, tensors in run.saver.saved.items():
        moves[step] = torch.cat([one for name, one in sorted(tensors.items()) if name.endswith("router.moves")])
    overflowed = [step for step, line in lines.items() if line["overflowed"]]
    assert 4 in overflowed
    assert {step: torch.equal(moves[step], moves[step - 1]) for step in range(2, 7)} == {
        step: step in overflowed for step in range(2, 7)
    }


class Decays(Overflows):
    def build_scheduler(self, optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def test_a_schedule_stays_where_it_is_in_a_step_that_float16_could_not_hold(one_rank: MakeRank) -> None:
    run = one_rank(workload=own("Decays", at=[4]), train={"dtype": "float16", "steps": 6})
    assert run.train() == ExitCode.FINISHED
    lines, rate = run.lines(), 0.01
    assert lines[4]["overflowed"]
    for _, line in sorted(lines.items()):
        assert line["lr"] == rate
        rate *= 1.0 if line["overflowed"] else 0.5


class Numbered(Plane):
    def build_model(self):
        return torch.nn.Linear(1, 1, bias=False)

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=1.0)

    def build_data(self, layout):
        self.data = super().build_data(layout)
        return self.data

    def loss(self, model, batch):
        self.newest = self.data.consumed
        out = model(torch.ones(1, 1)).sum() * self.data.consumed
        return out - out.detach() + 2.5

    def metrics(self):
        return {"batch": float(self.newest)}


class Scheduled(Numbered):
    def build_scheduler(self, optimizer):
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return self.scheduler


class Broken(Numbered):
    def loss(self, model, batch):
        return super().loss(model, batch) * (float("nan") if self.data.consumed == 4 else 1.0)


class Locates(Numbered):
    def loss(self, model, batch):
        pydoc.locate("located_late.WIDTH")
        return super().loss(model, batch)


def weights(run: OneRank) -> dict[int, float]:
    return {step: float(tensors["model/weight"]) for step, tensors in run.saver.saved.items()}


def test_every_step_moves_the_weights_by_its_own_gradient_clipped_and_at_its_rate(one_rank: MakeRank) -> None:
    run = one_rank(
        workload=own("Numbered"), optimizer={"warmup_steps": 2, "lr": 1e-2, "clip_norm": 2.5}, train={"steps": 4},
        checkpoint={"every": 1},
    )  # fmt: skip
    assert run.train() == ExitCode.FINISHED
    lines, found = run.lines(), weights(run)
    assert [lines[step]["grad_norm"] for step in (1, 2, 3, 4)] == [1.0, 2.0, 3.0, 4.0]
    assert [lines[step]["position"] for step in (1, 2, 3, 4)] == [0, 1, 2, 3]
    assert [lines[step]["loss"] for step in (1, 2, 3, 4)] == [2.5] * 4
    assert [lines[step]["metrics"] for step in (1, 2, 3, 4)] == [{"batch": float(step)} for step in (1, 2, 3, 4)]
    rates = [lines[step]["lr"] for step in (1, 2, 3, 4)]
    assert rates[:2] == [0.005, 0.01]
    assert rates[2] > rates[3]
    moved = [found[step] - found[step + 1] for step in (1, 2, 3)]
    clipped = (2.0, 2.5, 2.5)
    assert moved == pytest.approx([rate * norm for rate, norm in zip(rates[1:], clipped, strict=True)], rel=1e-4)


class PartlyTrained(Numbered):
    def build_model(self):
        return torch.nn.Linear(1, 1)

    def build_optimizer(self, model):
        if self.args["own"]:
            self.aside = {"bias": torch.optim.SGD([model.bias])}
        return torch.optim.SGD([model.weight], lr=1.0)


@pytest.mark.parametrize(("own_optimizer", "kept"), [(False, [0, 0, 0]), (True, [0, 1, 3])])
def test_gradients_of_parameters_that_no_optimizer_has_do_not_pile_up(
    one_rank: MakeRank, own_optimizer: bool, kept: list[int]
) -> None:
    run = one_rank(workload=own("PartlyTrained", own=own_optimizer), train={"steps": 3}, optimizer={"clip_norm": 99.0})
    assert run.train() == ExitCode.FINISHED
    norms = [line["grad_norm"] for _, line in sorted(run.lines().items())]
    assert norms == pytest.approx([math.hypot(step, step + more) for step, more in zip((1, 2, 3), kept, strict=True)])


def test_a_scheduler_of_the_workload_sets_the_rate_after_each_step(one_rank: MakeRank) -> None:
    run = one_rank(workload=own("Scheduled"), train={"steps": 3})
    assert run.train() == ExitCode.FINISHED
    assert [line["lr"] for _, line in sorted(run.lines().items())] == [1.0, 0.5, 0.25]
    assert run.session.objects.optimizer.param_groups[0]["lr"] == 0.125


def test_what_the_first_step_imports_by_its_name_is_in_the_code_record(
    one_rank: MakeRank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, before = tmp_path / "code", CodeRecord(covers="nothing")
    code.mkdir()
    monkeypatch.syspath_prepend(str(code))
    reasons = []
    for width in (1, 1, 2):  # the same attempt each time: a restart in place reads the file again
        (code / "located_late.py").write_text(f"WIDTH = {width}\n")
        run = one_rank(workload={**own("Locates"), "path": [str(code)]}, train={"steps": 2})
        before.write(run.session.attempt.code)
        assert run.train() == ExitCode.FINISHED
        del sys.modules["located_late"]
        now = CodeRecord.read(run.session.attempt.code)
        assert now is not None
        assert now.late == ("located_late",)
        recorded = [event.data["digest"] for event in run.events(EventKind.CODE_RECORDED)]
        assert recorded == ([now.digest] if now.digest != before.digest else [])
        reasons.append([event.data["reason"] for event in run.events(EventKind.CODE_CHANGED)])
        before = now
    assert reasons == [[], [], ["located_late changed since the code of this attempt was recorded"]]


def test_skipped_positions_are_taken_and_not_trained_on(one_rank: MakeRank) -> None:
    run = one_rank(workload=own("Numbered"), train={"steps": 3}, skip=(1, 2))
    assert run.train() == ExitCode.FINISHED
    assert [line["position"] for _, line in sorted(run.lines().items())] == [0, 3, 4]
    assert [line["grad_norm"] for _, line in sorted(run.lines().items())] == [1.0, 4.0, 5.0]


def test_a_loss_that_is_no_number_ends_the_rank_before_a_save_of_it(one_rank: MakeRank) -> None:
    run = one_rank(workload=own("Broken"), checkpoint={"every": 4})
    with pytest.raises(BadStep, match=r"^step 4: loss nan, gradient norm nan; its batch is at position 3 of the data$"):
        run.train()
    assert run.saver.tried == []
    assert not math.isfinite(float(run.lines()[4]["loss"]))


@pytest.mark.parametrize("skip", [(0,), (0, 1), (1, 2), (0, 1, 5)])
def test_a_new_level_of_the_losses_is_accepted_once_enough_batches_were_skipped_for_it(
    one_rank: MakeRank, skip: tuple[int, ...]
) -> None:
    spike = {"window": 8, "roll_backs": 2}
    run = one_rank(workload=own("Numbered"), train={"steps": 3}, detection={"spike": spike}, skip=skip)
    run.state.accepted_losses.extend([1.0] * 8)  # that of each step is 2.5
    if skip[:2] != (0, 1):
        with pytest.raises(LossSpike, match="^step 1: loss 2.5 is 150 robust standard deviations above 1"):
            run.train()
        assert run.events("loss.level") == []
        return
    assert run.train() == ExitCode.FINISHED
    (event,) = run.events("loss.level")
    assert event.data["step"] == 1
    assert "detection.spike.deviations=0" in event.data["reason"]
    assert run.saver.facts[3]["accepted_losses"] == [2.5] * 3


def test_a_loss_that_is_no_number_counts_before_a_restart_as_after_it(one_rank: MakeRank) -> None:
    target = {"target": "tests.trainer.worker.my_workload:OverflowsForGood", "args": {"width": 8}}
    run = one_rank(workload=target, train={"dtype": "float16", "steps": 8}, checkpoint={"every": 3})
    run.session.objects.data.seek(2)
    run.state.step, run.state.loss = 2, math.inf
    with pytest.raises(BadStep, match="^step 3: loss nan"):
        run.train()


def test_saves_follow_their_interval_and_the_last_step(one_rank: MakeRank) -> None:
    run = one_rank(workload=own("Numbered"), checkpoint={"every": 3})
    assert run.train() == ExitCode.FINISHED
    assert (run.saver.tried, run.saver.waits) == ([3, 6, 8], 2)
    assert {step: facts["loss"] for step, facts in run.saver.facts.items()} == dict.fromkeys((3, 6, 8), 2.5)
    cell = run.cell.read()
    assert (cell.step, cell.saved_step, cell.phase) == (8, 8, Phase.DONE)
    assert run.final()["step"] == 8
    assert run.final()["loss"] == 2.5
    (first,) = run.events("generation.first_step")
    assert (first.data["step"], first.data["seconds"] > 0) == (1, True)


def test_the_last_save_is_waited_for_and_tried_again(one_rank: MakeRank) -> None:
    saver = KeptSaves(accepts=lambda step: saver.tried.count(8) != 1)
    run = one_rank(saver, workload=own("Numbered"), checkpoint={"every": 0})
    assert run.train() == ExitCode.FINISHED
    assert saver.tried == [8, 8]


@pytest.mark.parametrize(
    ("saver", "why"),
    [
        (KeptSaves(commits=False, failure="disk full"), "disk full"),
        (KeptSaves(accepts=lambda step: False), "its save was skipped"),
    ],
)
def test_a_last_step_that_is_in_no_checkpoint_is_a_failure(one_rank: MakeRank, saver: KeptSaves, why: str) -> None:
    run = one_rank(saver, workload=own("Numbered"), checkpoint={"every": 0})
    with pytest.raises(SaveFailed, match=f"the last checkpoint was not saved: {why}"):
        run.train()
    assert saver.tried == ([8] if saver.failure else [8, 8])


def test_a_save_of_an_earlier_step_need_not_be_waited_for(one_rank: MakeRank) -> None:
    saver = KeptSaves(accepts=lambda step: step != 3)
    run = one_rank(saver, workload=own("Numbered"), checkpoint={"every": 3})
    assert run.train() == ExitCode.FINISHED
    assert saver.tried[0] == 3
    assert saver.tried.count(3) == 1
    assert saver.waits == 2


def test_too_many_steps_without_a_checkpoint_end_the_run(one_rank: MakeRank) -> None:
    saver = KeptSaves(commits=False)
    run = one_rank(saver, workload=own("Numbered"), checkpoint={"every": 2, "max_unsaved_steps": 4})
    text = r"5 steps are in no committed checkpoint; the newest is of step 0 \(checkpoint.max_unsaved_steps=4\): saves"
    with pytest.raises(SaveFailed, match=text):
        run.train()
    assert run.state.step == 5


def test_saves_that_can_never_succeed_end_the_run_at_once(one_rank: MakeRank) -> None:
    saver = KeptSaves(commits=False)
    run = one_rank(saver, workload=VALIDATED, checkpoint={"every": 2})
    workload: Any = run.session.objects.workload
    workload.at = lambda number: number == 3 and setattr(saver, "lasting", SaveFailed(2, "it never can"))
    with pytest.raises(SaveFailed, match="it never can"):
        run.train()
    assert run.state.step == 3


def test_commits_in_time_let_it_go_on(one_rank: MakeRank) -> None:
    run = one_rank(workload=own("Numbered"), checkpoint={"every": 2, "max_unsaved_steps": 4})
    assert run.train() == ExitCode.FINISHED


def test_best_checkpoints_need_a_number_that_exists(one_rank: MakeRank) -> None:
    run = one_rank(workload=own("Numbered"), checkpoint={"best": {"metric": "accuracy"}})
    text = r"^checkpoint.best.metric=accuracy: the workload has no such number, only loss, batch$"
    with pytest.raises(WorkloadError, match=text):
        run.train()
    validated = one_rank(workload=VALIDATED, validation={"every": 3}, checkpoint={"best": {"metric": "accuracy"}})
    with pytest.raises(WorkloadError, match="only loss, batches$"):
        validated.train()
    assert validated.state.step == 3


def test_a_restore_test_trains_to_its_step_and_saves_nothing(one_rank: MakeRank) -> None:
    run = one_rank(workload=own("Numbered"), checkpoint={"every": 2})
    assert run.train(test_until=5) == ExitCode.FINISHED
    assert (run.state.step, run.saver.tried, max(run.lines())) == (5, [], 5)
    assert "probe" not in run.final()


def test_a_stop_is_agreed_and_saved(one_rank: MakeRank) -> None:
    run = one_rank(workload=VALIDATED, checkpoint={"every": 0})
    ask(run, StopReason.CANCEL, at=3)
    assert run.train() == ExitCode.STOPPED_AFTER_SAVE
    (agreed,) = run.events("stop.agreed")
    assert agreed.data == {"step": 4, "reason": "cancel"}, "a step's votes are read when the next one is queued"
    assert run.saver.tried == [4]
    assert not run.session.attempt.final.exists()


def test_the_built_in_model_probes_one_step_more_and_changes_nothing(one_rank: MakeRank, text_tokens: Path) -> None:
    run = one_rank(
        workload={"target": "trainer.models.built_in:LlamaWorkload", "args": {}}, data={"path": str(text_tokens)},
        train={"steps": 4, "dtype": "float32"},
    )  # fmt: skip
    run.train()
    longer = one_rank(
        workload={"target": "trainer.models.built_in:LlamaWorkload", "args": {}}, data={"path": str(text_tokens)},
        train={"steps": 5, "dtype": "float32"}, optimizer={"lr": 0.0},
    )  # fmt: skip
    calm = one_rank(
        workload={"target": "trainer.models.built_in:LlamaWorkload", "args": {}}, data={"path": str(text_tokens)},
        train={"steps": 4, "dtype": "float32"}, optimizer={"lr": 0.0},
    )  # fmt: skip
    longer.train()
    calm.train()
    probe, fifth = calm.final()["probe"], longer.lines()[5]
    assert probe["step"] == 5
    assert (probe["loss"], probe["grad_norm"]) == (fifth["loss"], fifth["grad_norm"])
    assert run.final()["probe"]["lr"] == run.lines()[4]["lr"], "the rate of the last step goes on"
    assert all(parameter.grad is None for parameter in run.session.objects.model.parameters())


def test_votes_of_rank_0_are_followed_one_step_later(one_rank: MakeRank) -> None:
    run = one_rank(
        workload=own("Numbered"), train={"steps": 30}, checkpoint={"every": "auto", "auto": {"least": 10, "most": 10}}
    )
    assert run.train() == ExitCode.FINISHED
    assert run.saver.tried[0] == 10
    assert all(later - earlier >= 10 for earlier, later in zip(run.saver.tried, run.saver.tried[1:-1], strict=False))


def test_every_step_reports_its_work_and_stalls_and_changes_nothing_before_lazy_saves_have_copied_it(
    one_rank: MakeRank,
) -> None:
    class Slow(KeptSaves):
        def before_optimizer_step(self) -> None:
            time.sleep(0.002)
            for name, tensor in self.saved.get(max(self.saved, default=0), {}).items():
                assert torch.equal(self.live[name], tensor)

        def save(self, step: int, tensors: Mapping[str, torch.Tensor], *facts: Any, **more: Any) -> bool:
            time.sleep(0.02)
            self.live = tensors
            return super().save(step, tensors, *facts, **more)

    run = one_rank(Slow(), workload=own("Numbered"), train={"steps": 3}, checkpoint={"every": 1})
    assert run.train() == ExitCode.FINISHED
    assert sum(line["stall"] for line in run.lines().values()) >= 0.046, "the last save comes after the last line"
    for line in run.lines().values():
        assert sum(line["work"].values()) > 0
        assert "tokens_per_s" not in line
        assert "loss_scale" not in line
    assert run.cell.read().loss == 2.5


def test_what_is_waited_for_with_the_other_ranks_is_no_work_of_this_one(
    one_rank: MakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def noted(owner: Any, name: str) -> None:
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *some, **more: calls.append(name) or real(*some, **more))

    for owner, names in ((PhaseTracker, ("begin_wait", "resume")), (reduction, ("reduce",)), (Reduced, ("wait",))):
        for name in names:
            noted(owner, name)
    assert one_rank(workload=own("Numbered"), train={"steps": 1}).train() == ExitCode.FINISHED
    assert calls[:7] == ["begin_wait", "reduce", "wait", "resume", "begin_wait", "wait", "resume"]


def test_drills_strike_where_they_belong_in_a_step(one_rank: MakeRank) -> None:
    kinds = {"hang-in-data": 2, "hang-in-forward": 3, "hang-in-collective": 4, "hang-in-save": 5, "raise": 6}
    drilled = [{"kind": kind, "rank": 0, "step": step, "value": 0.001} for kind, step in kinds.items()]
    run = one_rank(workload=own("Numbered"), checkpoint={"every": 5}, drill={"events": drilled})
    with pytest.raises(DrillError, match="raised on rank 0 after step 6"):
        run.train()
    assert {event.data["kind"]: event.data["step"] for event in run.events("drill")} == kinds
    assert run.saver.tried == [5]
