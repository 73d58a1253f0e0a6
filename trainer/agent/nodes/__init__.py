"""The nodes of a job: presence, node ranks and fitness to train."""
