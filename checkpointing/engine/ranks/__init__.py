"""All ranks together: their process group, the messages between them, and what a failed one says."""
