"""Every read and write of the registry, by who makes it; the Store joins them."""
