"""A run's checkpoint tiers: their contents, and copies from one to the next. Does not import torch."""
