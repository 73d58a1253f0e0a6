"""Measurement of a cluster's network and storage by a short job (`orch doctor --nodes`)."""
