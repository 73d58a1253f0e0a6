"""Verification of checkpoints: digests, sizes, recorded verdicts. No torch."""
