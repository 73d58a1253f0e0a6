"""Verbs for the inside of jobs: top, attach, save, logs."""
