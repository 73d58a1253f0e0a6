"""Storage layer: backends, durable files, direct I/O, shared memory, and digests of written data."""
