"""Saves in the background: agreed, queued, written, committed."""
