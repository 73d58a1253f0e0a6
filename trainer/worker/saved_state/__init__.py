"""Contents of a run's checkpoints, and their save and restore on a rank."""
