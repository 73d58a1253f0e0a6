"""Run directories as the controller makes, reads and writes them."""
