"""Sections of the resolved configuration."""
