"""The control port: which processes may connect to the coordinator, and the messages between agents."""
