"""What an agent and its ranks agree on."""
