"""The training loop: steps, their reduction, saves, stops, loss spikes, drills."""
