"""What processes say to each other: one frozen dataclass for each message, and one codec for all of them."""
