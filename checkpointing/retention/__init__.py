"""Deletion of checkpoints: policy, pins, garbage. No torch."""
