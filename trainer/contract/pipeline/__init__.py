"""PURE: pipeline parallelism as numbers: which stage has which layers, what runs when, and how long ranks wait."""
