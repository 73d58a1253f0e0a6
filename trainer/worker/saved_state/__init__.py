"""What is in a checkpoint of a run, and how a rank saves and restores it."""
