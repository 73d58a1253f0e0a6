"""Detection of hanging and slow ranks and of the root cause, and collection of evidence."""
