"""PURE: pipeline parallelism: layers of stages, order of computation, and idle time of ranks."""
