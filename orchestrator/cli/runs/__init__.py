"""Verbs for runs: submit, status, show, wait, cancel, resume."""
