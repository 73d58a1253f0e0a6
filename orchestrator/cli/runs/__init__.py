"""Verbs about runs: submit, status, show, wait, cancel, resume."""
