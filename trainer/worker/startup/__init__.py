"""Work of a rank before its first step: imports, device, rendezvous, benchmark of its node."""
