"""A user's own program (`command:`) over generations and attempts: its failures, progress and checkpoints."""
