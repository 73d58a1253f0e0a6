"""Messages between processes: a frozen dataclass per message, and their codec."""
