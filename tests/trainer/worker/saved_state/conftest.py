"""A world of one rank in the process of the test."""

from tests.trainer.worker.training.one_rank import world

__all__ = ["world"]
