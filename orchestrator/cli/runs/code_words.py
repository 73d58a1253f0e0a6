"""The line of `orch show` about code: orch's version, the user's folders with their commits, the files' digest."""

import re
from collections.abc import Sequence
from typing import Any

from orchestrator.registry.records import Notice
from trainer.contract.events import EventKind

_DIGEST = re.compile(r"\b[0-9a-f]{32,64}\b")


def code_words(code: dict[str, Any], notices: Sequence[Notice]) -> str:
    """Describe the code in an identity, with the digest of the files that trained last, else of the submitted files."""
    ours = code.get("orch")
    words = [f"orch {ours.get('version')} {short_digests(ours.get('sha256'))}"] if isinstance(ours, dict) else []
    words += map(_place_words, code.get("user") or [])
    kinds = (EventKind.CODE_RECORDED, EventKind.CODE_CHANGED)
    trained = [notice for notice in notices if notice.kind in kinds and notice.data.get("digest")]
    if trained:
        words.append(f"files {short_digests(trained[-1].data['digest'])} (attempt {trained[-1].attempt})")
    elif digest := (code.get("files") or {}).get("digest"):
        words.append(f"files {short_digests(digest)}")
    return "   ".join(words)


def _place_words(place: dict[str, Any]) -> str:
    unknown = f" (changes not known: {place['dirty_reason']})" if place.get("dirty_reason") else ""
    dirty = " with changes" if place.get("dirty") else unknown
    commit = f" {short_digests(place['git'])}" if place.get("git") else ""
    return f"{place.get('path')}{commit}{dirty}"


def short_digests(value: Any) -> str:
    """Cut every digest in a text to twelve digits."""
    return _DIGEST.sub(lambda match: match[0][:12], str(value))
