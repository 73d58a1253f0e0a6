"""Faults on purpose and their score: drill, demo."""
