"""Access to the registry, the controller and a run's cluster."""
