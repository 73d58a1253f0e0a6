"""The places of a run's checkpoints: what lies in them, and copies from one to the next. No torch."""
