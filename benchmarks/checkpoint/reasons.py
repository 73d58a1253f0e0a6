"""Known reasons why a row misses its must, shown only while it does."""

_RATE = (
    "256 MiB are read twice more beside the steps, for digests and for fingerprints: with two cores that share a cache "
    "and a memory, digests alone cost about a tenth of the rate, fingerprints as much again; the same loss spread "
    "over a longer save would look better and cost as much"
)
_SAVE = (
    "the limit is a write with nothing beside it; here digests and fingerprints compute on the two cores that also "
    "serve the disk (without fingerprints: 0.92), and the two publications of a commit take 1.5 ms of about 65"
)
_LOAD = (
    "nothing reaches a tensor before every byte is verified, so the state is copied once more when the last byte has "
    "come: a seventh of the time on this machine"
)
_PLANNED = "finding the places of 4000 tensors takes 40 ms of Python on one of the two cores that read and digest"
_CACHED = "the bytes are in the page cache, where reading is one memcpy: the copy into the tensors is a second one"
_WARM_VERIFY = "reading is one memcpy out of the page cache, and a digest is one more pass over what was copied"

_STALL = (
    "4000 copies of 64 KiB cost 4 to 5 ms more than one of all their bytes, of 13 on a quiet machine (1.43); they "
    "suffer first when others want the same memory"
)

REASONS: dict[str, str] = {
    "stall-block-small": _STALL,
    "trainer-rate": _RATE,
    "save-big": _SAVE,
    "save-small": _SAVE,
    "load-cold-big": _LOAD,
    "load-cold-small": f"{_LOAD}; {_PLANNED}",
    "load-warm-big": _CACHED,
    "load-warm-small": f"{_CACHED}; {_PLANNED}",
    "verify-warm": _WARM_VERIFY,
}

UNKNOWN = "nobody has found out yet"
