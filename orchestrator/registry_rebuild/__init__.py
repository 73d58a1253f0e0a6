"""Rebuild of a registry from run directories (`orch db rebuild`)."""
