"""How evenly tokens are spread over experts."""

from trainer.worker.reporting.metrics import expert_loads
from trainer.worker.reporting.rank_comparison import EVERY


def test_the_least_the_median_and_the_most_of_all_layers() -> None:
    loads = [10.0, 10.0, 20.0, 0.0, 7.0, 13.0, 10.0, 10.0]
    due = {"least": 0.0, "median": 1.0, "most": 2.0, "layer": 0, "expert": 2}
    assert expert_loads(EVERY, loads, layers=2) == {"experts": due}


def test_not_in_every_step_and_not_without_experts_or_tokens() -> None:
    assert expert_loads(EVERY + 1, [1.0, 1.0], layers=1) == {}
    assert expert_loads(EVERY, [], layers=0) == {}
    assert expert_loads(EVERY, [0.0, 0.0], layers=1) == {}
