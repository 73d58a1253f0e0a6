"""Whether a checkpoint can be believed: digests, sizes, recorded verdicts, plausible values. No torch."""
