"""Communication between ranks: process groups, messages, and rank failures."""
