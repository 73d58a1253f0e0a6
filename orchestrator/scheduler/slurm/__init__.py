"""Slurm: its commands, what they print, and what may be asked of it."""
