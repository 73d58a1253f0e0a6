"""Contents of a run's checkpoints, and how a rank saves and restores them."""
