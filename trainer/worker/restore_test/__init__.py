"""A rank's part of a restore test: examine another run's checkpoint, restore it, train a few steps, judge."""
