"""Time to notice, name and repair a fault, compared with torchrun on the same faults."""
