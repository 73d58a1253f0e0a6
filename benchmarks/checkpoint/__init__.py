"""The checkpoint engine beside the hardware's limit, torch's own checkpoints and its own promises."""
