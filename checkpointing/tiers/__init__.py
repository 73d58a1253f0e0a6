"""Checkpoint tiers of a run: their contents, and copies from one to the next. No torch."""
