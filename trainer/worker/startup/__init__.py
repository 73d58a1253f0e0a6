"""A rank's work before its first step: imports, device, rendezvous, node benchmark."""
