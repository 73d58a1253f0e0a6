"""Audits of a checkpoint's values on one machine: structure, verification levels 3 and 4, and diffs."""
