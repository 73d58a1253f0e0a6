"""PURE: both ends of a control connection prove that they have the attempt's token, which never crosses the network.

The listener sends a challenge. The hello answers it, and brings the agent's own nonce; from both nonces and the token
come two keys, one for each direction. Every line carries an HMAC over its number and its text: a line that is forged,
changed, replayed, left out or sent back does not match.
"""

import hashlib
import hmac
import secrets

from trainer.contract.messages.codec import encode
from trainer.contract.messages.greeting import Challenge

PROOF_BYTES = 65
"""Bytes by which a line grows: 64 digits and a space."""
_NONCE_DIGITS = 64


class Seal:
    """The proofs of one direction, in the order of its lines."""

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def sealed(self, line: bytes) -> bytes:
        """The line with its proof before it."""
        return self._proof(line) + b" " + line

    def opened(self, line: bytes) -> bytes | None:
        """The line without its proof; None when that is not the one of the next line."""
        proof, space, text = line[: PROOF_BYTES - 1], line[PROOF_BYTES - 1 : PROOF_BYTES], line[PROOF_BYTES:]
        return text if space == b" " and hmac.compare_digest(proof, self._proof(text)) else None

    def _proof(self, text: bytes) -> bytes:
        self._count += 1
        return hmac.digest(self._key, self._count.to_bytes(8, "big") + text, "sha256").hex().encode()


def new_nonce() -> str:
    """A number that is used once."""
    return secrets.token_hex(_NONCE_DIGITS // 2)


def is_nonce(text: str) -> bool:
    return len(text) == _NONCE_DIGITS


def challenge_line(nonce: str) -> bytes:
    """What a listener sends first to everybody who connects."""
    return (encode(Challenge(nonce=nonce)) + "\n").encode()


def hello_seal(token: str, challenge: str) -> Seal:
    """What an agent's first line is sealed with: it answers this challenge and no other."""
    return Seal(_key(token, "hello", challenge))


def session_seals(token: str, challenge: str, nonce: str) -> tuple[Seal, Seal]:
    """The seals of the listener's lines and of the agent's."""
    return Seal(_key(token, "listener", challenge, nonce)), Seal(_key(token, "agent", challenge, nonce))


def _key(token: str, *parts: str) -> bytes:
    # HMAC fills a short key up with zeros, so that two would be the same: a digest has its full length.
    secret = hashlib.sha256(token.encode(errors="replace")).digest()
    return hmac.digest(secret, "\0".join(("orch control/2", *parts)).encode(errors="replace"), "sha256")
