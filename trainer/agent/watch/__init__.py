"""Detection of hanging and slow ranks and of the root cause. Pure except for sampling."""
