"""Restore tests: due dates, creation as separate runs, and effects of their verdicts."""
