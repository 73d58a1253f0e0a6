"""The learning rate: a pure function of the step, so that a restart needs no scheduler state."""

import math

from trainer.contract.config import OptimizerConfig


def learning_rate(optimizer: OptimizerConfig, steps: int, step: int) -> float:
    """Rate of step `step` (counted from 1) of `steps`: linear warm-up, then a cosine down to `min_lr_ratio`."""
    if step <= optimizer.warmup_steps:
        return optimizer.lr * step / optimizer.warmup_steps
    span = max(1, steps - optimizer.warmup_steps)
    done = min(1.0, (step - optimizer.warmup_steps) / span)
    floor = optimizer.lr * optimizer.min_lr_ratio
    return floor + (optimizer.lr - floor) * 0.5 * (1.0 + math.cos(math.pi * done))
