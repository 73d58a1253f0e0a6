"""The login-node side: command line, registry, schedulers and the controller."""
