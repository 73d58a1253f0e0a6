"""Schedulers behind one seam: Slurm and this machine."""
