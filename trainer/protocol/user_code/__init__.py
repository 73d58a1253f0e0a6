"""The user's code: the files that a program imports, their digests, and the effect of changes."""
