"""Outcomes of ranks and attempts, and the meaning of failures."""
