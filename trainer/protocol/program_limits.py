"""Linux's limits on a program's arguments and environment variables (`man 2 execve`)."""

MAX_STRING_BYTES = (1 << 17) - 1
"""Maximum size in bytes of one argument, or of one NAME=value, without the final zero byte."""
MAX_TOTAL_BYTES = 6 << 20
"""Maximum total size in bytes of all arguments and variables, regardless of the stack limit."""
_POINTER_BYTES = 9
"""Overhead per string: the final zero byte and a pointer."""


def excess_bytes(text: str) -> int:
    """Return the number of bytes by which an argument or a NAME=value exceeds the limit."""
    return max(0, len(text.encode(errors="surrogateescape")) - MAX_STRING_BYTES)


def total_bytes(texts: list[str]) -> int:
    """Return the size of all arguments and variables in bytes."""
    return sum(len(text.encode(errors="surrogateescape")) + _POINTER_BYTES for text in texts)
