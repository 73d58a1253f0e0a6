"""A program's loss that is NaN or infinite for several steps."""

import pytest

from trainer.agent.watch.bad_losses import LEAST, BadLosses, shows_unusable_loss


def judge(*rows, log=""):
    losses = BadLosses()
    losses.add_report(rows)
    return losses.judge(lambda rank: log)


def test_two_ranks_agree():
    found = judge((0, LEAST, 41, 100.0), (1, LEAST + 1, 40, 99.0))
    assert found.reason == "the loss has been NaN or infinite since step 40, 8 times in a row: ranks 0, 1"
    assert (found.step, found.finite_until) == (40, 99.0)


def test_a_rank_and_its_log_agree():
    log = "step 39 loss 2.5\nstep 40 loss nan\n"
    found = judge((3, LEAST, 40, 99.0), log=log)
    assert found.reason.endswith("8 times in a row: rank 3 and its log")
    assert judge((3, LEAST, 40, 99.0), log="step 40 loss 2.5\n") is None
    assert judge((3, LEAST, 40, 99.0)) is None, "it has printed no loss"


def test_few_unusable_losses_and_a_rank_with_a_finite_one_prove_nothing():
    assert judge((0, LEAST - 1, 40, 99.0), (1, LEAST - 1, 40, 99.0), log="loss nan") is None
    assert judge((0, LEAST, 40, 99.0), (1, LEAST, 40, 99.0), (2, 0, 0, 120.0), log="loss nan") is None


def test_a_loss_that_is_finite_again_ends_the_suspicion():
    losses = BadLosses()
    losses.add_report([(0, 20, 40, 99.0), (1, 20, 40, 99.0)])
    assert losses.is_suspect()
    losses.add_report([(0, 0, 40, 130.0)])
    assert not losses.is_suspect()


@pytest.mark.parametrize(
    ("log", "unusable"),
    [
        ("loss: nan", True),
        ("{'loss': nan, 'lr': 0.1}", True),
        ("train_loss=inf", True),
        ("loss tensor(nan, grad_fn=<MeanBackward0>)", True),
        ("Loss -inf", True),
        ("loss 1.5e-3", False),
        ("loss nan\nloss 0.25", False),
        ("the loss function is infinite-horizon", False),
        ("nan found in gradients", False),
        ("", False),
    ],
)
def test_the_newest_loss_in_a_log(log, unusable):
    assert shows_unusable_loss(log) is unusable
