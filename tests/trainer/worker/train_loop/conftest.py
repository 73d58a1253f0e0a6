"""Runs of one rank in the process of the test."""

from tests.trainer.worker.train_loop.one_rank import one_rank, world

__all__ = ["one_rank", "world"]
