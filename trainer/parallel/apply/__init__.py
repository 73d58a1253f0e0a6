"""Device meshes, and the application of each kind of parallelism to models."""
