"""Time of a restore test compared with raw reads of the same files, and its cost for a concurrent run."""
