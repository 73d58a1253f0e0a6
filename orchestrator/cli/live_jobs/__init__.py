"""Verbs that look into jobs: top, attach, save, logs."""
