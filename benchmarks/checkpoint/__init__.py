"""The checkpoint engine compared with the hardware's limit, torch's checkpoints and its own targets."""
