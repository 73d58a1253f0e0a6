"""Reads and writes of the registry, grouped by their caller; the Store joins them."""
