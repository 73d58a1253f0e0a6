"""The nodes of a job: which are here, with which node rank, and fit to train."""
