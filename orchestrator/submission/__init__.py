"""Checks and records made by `orch submit` and `orch resume` before a controller takes over."""
