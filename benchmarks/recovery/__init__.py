"""How soon a fault is noticed, named and mended, beside torchrun on the same faults."""
