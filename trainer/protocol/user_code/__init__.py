"""The user's code: files that a program imports, their digests, and the response to changes."""
