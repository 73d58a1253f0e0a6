"""`orch compare`: runs beside each other, and whether they computed the same."""
