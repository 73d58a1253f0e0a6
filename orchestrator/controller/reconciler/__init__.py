"""A pass over all live runs: ownership, user requests, decisions and effects."""
