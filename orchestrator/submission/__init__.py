"""Checks and records of `orch submit` and `orch resume` before a controller takes over: config, identity, intent."""
