"""The user's code: which files of it a program imports, their digests, and what a change of them means."""
