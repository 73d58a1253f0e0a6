"""Conversion of a user's sbatch script into a configuration."""
