"""Unusual state is restored bit for bit from memory and disk, or refused by name."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from checkpointing.engine.checkpointer import Checkpointer
from checkpointing.engine.collectives.group import World
from checkpointing.errors import NothingFits
from checkpointing.storage.backends import LocalStorage
from checkpointing.tiers.catalog import Owner
from checkpointing.tiers.tier import RunTiers
from tests.checkpointing.in_process_writer import InProcessWriter
from tests.trainer.conftest import hang
from tests.trainer.worker.unusual_state import targets
from tests.trainer.worker.unusual_state.cases import KEPT, REFUSED, Usual
from tests.trainer.worker.unusual_state.objects import FORGOTTEN
from tests.trainer.worker.unusual_state.optimizers import LATE_TENSORS
from trainer.parallel.apply import mesh
from trainer.protocol.failures.outcome import ExitCode
from trainer.worker import workload as workloads
from trainer.worker.data import with_position
from trainer.worker.saved_state.train_state import TrainObjects, TrainState
from trainer.worker.workload import WorkloadError

SAVED, LAST = 3, 6


@pytest.fixture(autouse=True)
def no_default_device() -> Iterator[None]:
    yield
    torch.set_default_device(None)


class Trainer:
    """A process that trains a workload; only `link` and the folder outlive it."""

    def __init__(
        self, case: type[Usual], layout: mesh.Layout, root: Path, link: Any, inherit: tuple[str, ...] = ()
    ) -> None:
        torch.manual_seed(5)
        torch.set_default_device(None)  # a new process has none
        made = case(None)  # type: ignore[arg-type]
        model = made.build_model()
        optimizer = workloads.build_optimizer(made, model)
        self.objects = TrainObjects(
            workload=made, model=model, optimizer=optimizer, data=with_position(made.build_data(layout)), layout=layout,
            scheduler=workloads.build_scheduler(made, optimizer),
        )  # fmt: skip
        self.incomplete: list[str] = []
        self.incomplete_at: set[int] = set()
        self.state = TrainState(self.objects, config_digest="", seed=5, warn=self.warn)
        owner = Owner(2 if inherit else 1, "0000000b" if inherit else "0000000a", inherit, lambda: True)
        self.saver = Checkpointer(owner, World(), RunTiers.single(root, LocalStorage(root)), lambda *_: None, link=link)
        self.losses: dict[int, float] = {}

    def warn(self, step: int, reason: str) -> None:
        self.incomplete.append(reason)
        self.incomplete_at.add(step)

    def restore(self) -> "Trainer":
        self.state.restore(self.saver)
        return self

    def train(self, last: int) -> "Trainer":
        objects = self.objects
        while self.state.step < last:
            (batch,) = objects.data.take()
            loss = objects.workload.loss(objects.model, batch)
            loss.backward()
            objects.optimizer.step()
            objects.optimizer.zero_grad(set_to_none=True)
            if objects.scheduler is not None:
                objects.scheduler.step()
            self.state.step += 1
            self.state.loss = self.losses[self.state.step] = float(loss.detach())
            self.state.step_ended()
        return self

    def save(self) -> "Trainer":
        assert self.state.save(self.saver)
        self.saver.wait()
        assert self.saver.failure is None
        return self

    def everything(self) -> Any:
        objects = self.objects
        buffers = {
            name: {key: comparable(one) for key, one in module._buffers.items()}
            for name, module in objects.model.named_modules()
        }
        optimizer = objects.optimizer.state_dict()
        more = [getattr(one, "state_dict", dict)() for one in (objects.scheduler, objects.workload)]
        return [buffers, comparable([objects.model.state_dict(), optimizer, more, torch.get_rng_state()])]


def comparable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        flat = value.detach().resolve_conj().contiguous().reshape(-1)
        return [str(value.dtype), tuple(value.shape), bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""]
    if isinstance(value, dict):
        items = sorted((repr(key), comparable(one)) for key, one in value.items())
        return [type(value), items if type(value) is dict else [(repr(key), comparable(value[key])) for key in value]]
    if isinstance(value, list | tuple):
        return [type(value), [comparable(one) for one in value]]
    return repr(value)


@pytest.mark.parametrize("name", KEPT)
def test_it_comes_back_bit_for_bit_in_place_and_in_a_new_job(name: str, layout: mesh.Layout, tmp_path: Path) -> None:
    case, link = KEPT[name], InProcessWriter(LocalStorage(tmp_path))
    calm = Trainer(case, layout, tmp_path, link).restore().train(SAVED).save()
    saved = calm.everything()
    calm.train(LAST)
    (checkpoint,) = (path.name for path in tmp_path.iterdir() if path.name.startswith("step-"))
    other = InProcessWriter(LocalStorage(tmp_path))
    for again in (
        Trainer(case, layout, tmp_path, link),
        Trainer(case, layout, tmp_path, other, inherit=(checkpoint,)),
    ):
        again.restore()
        assert again.state.step == SAVED
        assert again.everything() == saved
        again.train(LAST)
        assert again.losses == {step: loss for step, loss in calm.losses.items() if step > SAVED}
        assert again.everything() == calm.everything()
        assert again.incomplete == []
        again.save()  # what was restored can be saved again
    for each in (calm, again):
        each.saver.close()


@pytest.mark.parametrize("name", FORGOTTEN)
def test_what_a_module_forgets_is_reported_by_name(name: str, layout: mesh.Layout, tmp_path: Path) -> None:
    case, attributes = FORGOTTEN[name]
    link = InProcessWriter(LocalStorage(tmp_path))
    calm = Trainer(case, layout, tmp_path, link).restore().train(SAVED).save()
    again = Trainer(case, layout, tmp_path, link).restore().train(SAVED + 2)
    assert again.incomplete == []
    again.train(LAST).train(LAST + 1)
    words = "had changed in the model and is not saved: set it in the workload's load_state_dict(), or make it a buffer"
    assert again.incomplete == ([f"{attributes} {words}"] if attributes else [])
    assert again.incomplete_at <= {SAVED}
    for each in (calm, again):
        each.saver.close()


@pytest.mark.parametrize("name", LATE_TENSORS)
def test_tensors_that_an_optimizer_keeps_after_the_first_save_come_back(
    name: str, layout: mesh.Layout, tmp_path: Path
) -> None:
    link = InProcessWriter(LocalStorage(tmp_path))
    calm = Trainer(LATE_TENSORS[name], layout, tmp_path, link).restore()
    for step in range(1, SAVED + 1):
        calm.train(step).save()
    saved = calm.everything()
    calm.train(LAST)
    again = Trainer(LATE_TENSORS[name], layout, tmp_path, link).restore()
    assert again.state.step == SAVED
    assert again.everything() == saved
    assert again.train(LAST).everything() == calm.everything()
    for each in (calm, again):
        each.saver.close()


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_name(name: str, layout: mesh.Layout, tmp_path: Path) -> None:
    case, words, at_save = REFUSED[name]
    link = InProcessWriter(LocalStorage(tmp_path))
    if not at_save:
        with pytest.raises(WorkloadError) as error:
            Trainer(case, layout, tmp_path, link).restore()
    else:
        trainer = Trainer(case, layout, tmp_path, link).restore().train(1)
        with pytest.raises(WorkloadError) as error:
            trainer.save()
    assert words in str(error.value)


def setting(name: str, strategy: str = "ddp") -> dict[str, Any]:
    return {
        "workload": {"target": f"{targets.__name__}:{name}"},
        "train": {"steps": 10, "dtype": "float32"},
        "parallel": {"strategy": strategy},
        "checkpoint": {"every": 2},
    }


SHARDED = (
    "BufferOfForward", "Growing", "ExtraDict", "DerivedByLoad", "OfEachRank", "NestedObjects", "SkippedUpdates",
    "Thawed", "BuiltInEvaluation",
)  # fmt: skip


@pytest.mark.multi
@pytest.mark.parametrize(
    ("name", "strategy"),
    [("AllAtOnce", "ddp")]
    + [pytest.param(name, "ddp", marks=pytest.mark.proof) for name in KEPT if name != "AllAtOnce"]
    + [pytest.param(name, "fsdp", marks=pytest.mark.proof) for name in SHARDED],
)
def test_ranks_that_are_killed_go_on_with_the_same_bits(make_run: Any, name: str, strategy: str) -> None:
    calm = make_run(2, **setting(name, strategy))
    assert calm.train()["codes"] == [0, 0], calm.log()
    hurt = make_run(2, **setting(name, strategy), drill=hang(0, step=8))
    # A save of another form than the one before is skipped while that is still being written.
    assert hurt.train_until_killed(0, committed=2)["codes"][0] == -9, hurt.log()
    assert hurt.train()["codes"] == [0, 0], hurt.log()
    assert hurt.losses() == calm.losses()
    assert hurt.final()["weights_digest"] == calm.final()["weights_digest"]


@pytest.mark.multi
def test_ranks_end_at_once_with_the_name_of_what_cannot_be_saved(make_run: Any) -> None:
    run = make_run(2, **setting("LateMetaInState"))
    assert run.train()["codes"] == [ExitCode.NEVER_RETRY] * 2, run.log()
    assert "step 2 cannot be saved" in (run.outcome(0, 1).message or "")
    assert "workload:own: a tensor on the meta device" in (run.outcome(0, 1).message or "")


# ---- another model than that of the checkpoint


class Removed(Usual):
    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.Identity(), nn.Tanh(), nn.Dropout(0.1), nn.Linear(6, 1, bias=False))


class Frozen(Usual):
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model[4].parameters(), lr=0.05, momentum=0.9)


class Normed(Usual):
    def odd(self) -> nn.Module:
        return nn.BatchNorm1d(6, affine=False)


ANOTHER = [
    (Usual, Removed, "has model/4.bias and 1 more, which the model lacks"),
    (Removed, Usual, "has no tensor model/4.bias"),
    (Normed, Usual, "has buffers/rank-00000/1.num_batches_tracked and 2 more, which the model lacks"),
    (Usual, Normed, "has no tensor buffers/rank-00000/1.num_batches_tracked"),
    (Usual, Frozen, "has optimizer/0.bias/momentum_buffer and 1 more, which the model lacks"),
    (KEPT["ExtraState"], Usual, "only the checkpoint has an extra state for module 1"),
    (Usual, KEPT["ExtraState"], "only the model has an extra state for module 1"),
    (KEPT["AverageOfWeights"], Usual, "has a workload state (average), but Usual has no load_state_dict()"),
]


@pytest.mark.parametrize(("before", "after", "words"), ANOTHER)
def test_a_checkpoint_of_another_model_is_refused_by_name_in_both_directions(
    before: type[Usual], after: type[Usual], words: str, layout: mesh.Layout, tmp_path: Path
) -> None:
    link = InProcessWriter(LocalStorage(tmp_path))
    Trainer(before, layout, tmp_path, link).restore().train(SAVED).save().saver.close()
    (checkpoint,) = (path.name for path in tmp_path.iterdir() if path.name.startswith("step-"))
    with pytest.raises((NothingFits, WorkloadError)) as error:
        Trainer(after, layout, tmp_path, InProcessWriter(LocalStorage(tmp_path)), inherit=(checkpoint,)).restore()
    assert words in str(error.value)


@pytest.mark.multi
def test_a_save_that_can_never_succeed_ends_the_ranks_at_once(make_run: Any) -> None:
    workload = {"target": "tests.trainer.worker.my_workload:BecomesNaN", "args": {"width": 8, "at": 3}}
    run = make_run(1, **{**setting(""), "workload": workload, "train": {"steps": 400, "dtype": "float32"}})
    assert run.train()["codes"] == [ExitCode.ERROR], run.log()
    outcome = run.outcome(0, 1)
    assert (outcome.exception, outcome.message) == ("UnsavableState", "step 4: NaN in trained weights: model/aside (3)")
    assert outcome.step < 400
