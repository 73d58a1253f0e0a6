"""The lease of one scheduler's runs: who holds it, when it may be taken over, and waiting for it."""
