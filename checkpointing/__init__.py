"""Sharded checkpoints that are verified before they are trusted."""
