"""Secrets of a run, and their redaction from its output."""
