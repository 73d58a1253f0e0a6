"""How verbs reach the registry, the controller and a run's cluster."""
