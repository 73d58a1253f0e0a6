"""Which checkpoints are deleted, and how: policy, pins, garbage. No torch."""
