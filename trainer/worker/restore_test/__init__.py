"""A rank's part of a restore test: examine a checkpoint of another run, restore it, train a few steps, judge."""
