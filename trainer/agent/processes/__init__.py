"""The processes of a node: forked, watched, and killed when the agent dies."""
