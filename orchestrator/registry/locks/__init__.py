"""Whether a file system can hold the registry, and the lock by link() where its own locks do not suffice."""
