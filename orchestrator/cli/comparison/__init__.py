"""`orch compare`: runs side by side, and whether they computed the same."""
