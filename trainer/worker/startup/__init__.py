"""What a rank does before its first step: imports, device, rendezvous, the benchmark of its node."""
