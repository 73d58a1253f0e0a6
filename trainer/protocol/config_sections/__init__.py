"""Sections of the resolved configuration, one file each, and the keys of older versions."""
