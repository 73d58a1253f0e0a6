"""Deletion of checkpoints: policy, pins, garbage. Does not import torch."""
