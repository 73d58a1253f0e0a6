"""Restore tests: when one is due, how it becomes a run of its own, and what its verdict changes."""
