"""Control port: authenticated connections to the coordinator and the messages between agents."""
