"""What `orch submit` and `orch resume` check and write before a controller takes over: config, identity, intent."""
