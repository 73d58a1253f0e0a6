"""What the loop does at the boundary of a step, seen in what it saves and reports: one rank, in this process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.trainer.worker.my_workload import Plane
from tests.trainer.worker.training.one_rank import OneRank
from trainer.contract.failures.outcome import ExitCode
from trainer.contract.ranks.progress import StopReason

MakeRank = Callable[..., OneRank]
HERE = "tests.trainer.worker.training.test_loop_of_one_rank"


class Validated(Plane):
    """Calls `at` with the number of each batch; a validation finds how many batches there were."""

    def __init__(self, config, **args):
        super().__init__(config, **args)
        self.at = lambda number: None

    def build_data(self, layout):
        self.data = super().build_data(layout)
        return self.data

    def loss(self, model, batch):
        self.at(self.data.consumed)
        return super().loss(model, batch)

    def validate(self, model):
        return {"batches": float(self.data.consumed)}


def own(name: str, **args: object) -> dict[str, object]:
    return {"target": f"{HERE}:{name}", "args": {"width": 8, **args}}


def ask(run: OneRank, reason: StopReason, *, at: int) -> None:
    """As the agent does it during this step."""
    workload: Any = run.session.objects.workload
    workload.at = lambda number: number == at and run.cell.ask_stop(reason)


def test_the_experts_biases_stay_where_they_are_in_a_step_that_float16_could_not_hold(
    one_rank: MakeRank, text_tokens: Path
) -> None:
    run = one_rank(
        workload={"target": "trainer.worker.llama:LlamaWorkload", "args": {}}, data={"path": str(text_tokens)},
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


def test_a_stop_leaves_the_validation_of_its_step_to_the_next_start(one_rank: MakeRank) -> None:
    run = one_rank(workload=own("Validated"), validation={"every": 4}, checkpoint={"every": 0})
    ask(run, StopReason.PREEMPTION, at=4)
    assert run.train() == ExitCode.STOPPED_AFTER_SAVE
    assert (run.state.step, run.saver.tried, run.validated()) == (4, [4], [])
    run.restart()
    assert run.train() == ExitCode.FINISHED
    assert run.validated() == [4, 8]


def test_a_save_that_is_asked_for_leaves_no_validation_out(one_rank: MakeRank) -> None:
    run = one_rank(workload=own("Validated"), validation={"every": 4}, checkpoint={"every": 0})
    ask(run, StopReason.SAVE_AND_GO_ON, at=4)
    assert run.train() == ExitCode.FINISHED
    assert (run.saver.tried, run.validated()) == ([4, 8], [4, 8])
