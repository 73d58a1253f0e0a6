"""Training loop: steps, their reduction, saves, stops, loss spikes and drills."""
