"""Secrets of a run, and how they are kept out of what it writes."""
