"""The learning rate: a pure function of the step, so that a restart needs no scheduler state."""

import math

from trainer.contract.config import TrainConfig


def learning_rate(train: TrainConfig, step: int) -> float:
    """Rate of optimizer step `step` (counted from 1): linear warm-up, then a cosine down to `min_lr_ratio`."""
    if step <= train.warmup_steps:
        return train.lr * step / train.warmup_steps
    span = max(1, train.steps - train.warmup_steps)
    done = min(1.0, (step - train.warmup_steps) / span)
    floor = train.lr * train.min_lr_ratio
    return floor + (train.lr - floor) * 0.5 * (1.0 + math.cos(math.pi * done))
