"""PURE: which gradients travel together where plain replicas average them."""

from collections.abc import Hashable, Iterable, Iterator

BUCKET_BYTES = 25 << 20
"""Gradients that travel together, at most; a larger one travels alone (the default of torch's DDP)."""


def packed(gradients: Iterable[tuple[Hashable, int]]) -> Iterator[list[int]]:
    """Positions of neighbours of one kind that fit into a bucket; each gradient is its kind and its bytes."""
    bucket: list[int] = []
    size, last = 0, None
    for position, (kind, nbytes) in enumerate(gradients):
        if bucket and (kind != last or size + nbytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(position)
        size, last = size + nbytes, kind
    if bucket:
        yield bucket
