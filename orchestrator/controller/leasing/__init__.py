"""Lease of one scheduler's runs: holder, takeover rule, and waiting."""
