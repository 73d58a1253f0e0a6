"""Calls of the package `orch` for a program with its own training loop: checkpoints and batches."""
