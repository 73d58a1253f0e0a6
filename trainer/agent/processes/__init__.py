"""The processes of a node: forked, watched, and taken along when the agent dies."""
