"""The control port: who may speak to the coordinator, and the words that travel between agents."""
