"""Detects hanging and slow ranks, finds the root cause and collects evidence."""
