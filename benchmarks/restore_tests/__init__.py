"""What a restore test takes, beside raw reads of the same files, and what it costs a run beside it."""
