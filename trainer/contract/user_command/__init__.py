"""Contract between a user's own program and its agent."""
