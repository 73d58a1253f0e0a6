"""Contract between an agent and its ranks."""
