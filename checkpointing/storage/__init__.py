"""Where bytes lie: storage backends, durable files, direct I/O, shared memory, digests of what is written."""
