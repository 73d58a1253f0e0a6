"""Slurm: its commands, their output and their options."""
