"""Fault injection with a score: drill, demo."""
