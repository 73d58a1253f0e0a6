"""Schedulers behind one interface: Slurm and this machine."""
