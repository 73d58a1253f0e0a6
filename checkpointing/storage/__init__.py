"""Storage layer: backends, durable files, direct I/O, shared memory, digests of written data."""
