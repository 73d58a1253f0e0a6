"""A user's own program (`command:`) across generations and attempts: failures, progress and checkpoints."""
