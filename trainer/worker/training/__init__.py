"""The training loop: steps, their reduction, when to save, when to stop, loss spikes, drills."""
