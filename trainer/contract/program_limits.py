"""PURE: what Linux allows a program to be started with (`man 2 execve`)."""

MAX_STRING_BYTES = (1 << 17) - 1
"""Bytes of one argument, or of one NAME=value, without the final zero byte."""
MAX_TOTAL_BYTES = 6 << 20
"""Bytes of all arguments and variables, whatever the limit on the stack is."""
_POINTER_BYTES = 9
"""What each of them takes beside its text: a final zero byte and a pointer."""


def excess_bytes(text: str) -> int:
    """By how many bytes an argument, or a NAME=value, is too long."""
    return max(0, len(text.encode(errors="surrogateescape")) - MAX_STRING_BYTES)


def total_bytes(texts: list[str]) -> int:
    """Bytes that arguments and variables take together."""
    return sum(len(text.encode(errors="surrogateescape")) + _POINTER_BYTES for text in texts)
