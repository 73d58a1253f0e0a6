"""A rank's part of a restore test: verify another run's checkpoint, restore it, train a few steps and judge them."""
