"""Verbs that look into live jobs: top, attach, save, logs."""
