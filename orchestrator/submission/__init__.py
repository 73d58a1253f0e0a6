"""What `orch submit` does before a controller takes over: checks, the run's identity, its first intent."""
