"""Device meshes, and application of each kind of parallelism to models."""
