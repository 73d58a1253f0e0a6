"""Verification of checkpoints: digests, sizes, recorded verdicts. Does not import torch."""
