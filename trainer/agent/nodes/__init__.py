"""The nodes of a job: who is here, in which seat, and fit to train."""
