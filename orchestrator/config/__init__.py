"""The configuration of a run: files and overrides, resolved and checked."""
