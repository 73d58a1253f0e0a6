"""Messages between processes, one frozen dataclass each, and their codec."""
