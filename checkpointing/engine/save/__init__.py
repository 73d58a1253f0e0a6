"""Background saves: agreement, queue, writes, commit."""
