"""A world of one rank in the process of the test."""

from tests.trainer.worker.train_loop.one_rank import world

__all__ = ["world"]
