"""Work of a rank before its first step: imports, device, rendezvous, node benchmark."""
