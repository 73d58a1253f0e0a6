"""Device mesh, and wrapping of models for data parallelism."""
