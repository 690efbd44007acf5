"""How two ends of a control line show each other that they have the fleet's secret, which never travels. Pure.

    caller  ── NONCE: its nonce ──────────────────────────────►  called
            ◄── NONCE: its nonce, a proof over both ──────────
            ── HELLO: the hello, a proof over it and both ────►
            ◄── HELLO: the hello, a proof over it and both ───

The called end proves first: whoever answers at an address that is called learns neither the secret nor how to reach the
caller's memory. A proof is an HMAC-SHA-256 over who gives it, both nonces and the hello: of use on this line alone, once.
Frames after the hellos carry no proof: lines belong on a network where nobody changes them.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field

from kv_transfer.api import KvTransferError

NONCE_BYTES = PROOF_BYTES = 32


class GreetingError(KvTransferError):
    """The other end has another secret, or speaks another protocol."""


@dataclass(slots=True)
class Greeting:
    """Of one line, at one end. Its methods belong in the order of the module's picture; they raise GreetingError."""

    secret: str = field(repr=False)
    called: bool
    _mine: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES), repr=False)
    _theirs: bytes = field(default=b"", repr=False)

    @property
    def begun(self) -> bool:
        """Whether the other end's nonce is there."""
        return bool(self._theirs)

    def call(self) -> bytes:
        """The caller's first frame."""
        return self._mine

    def answer(self, frame: bytes) -> bytes:
        """The called end's answer to `call`."""
        if len(frame) != NONCE_BYTES or self.begun:
            raise GreetingError("what begins a line is one nonce: run the same software on both ends")
        self._theirs = frame
        return self._mine + self._proof(self.called, b"")

    def take_answer(self, frame: bytes) -> None:
        """At the caller."""
        if len(frame) != NONCE_BYTES + PROOF_BYTES or self.begun:
            raise GreetingError("the answer to a nonce is a nonce and a proof: run the same software on both ends")
        self._theirs = frame[:NONCE_BYTES]
        self._check(frame[NONCE_BYTES:], b"")

    def seal(self, hello: bytes) -> bytes:
        """The frame of this end's hello."""
        return self._proof(self.called, hello) + hello

    def unseal(self, frame: bytes) -> bytes:
        """The other end's hello."""
        if not self.begun or len(frame) < PROOF_BYTES:
            raise GreetingError("a hello before the nonces, or without a proof: run the same software on both ends")
        self._check(frame[:PROOF_BYTES], frame[PROOF_BYTES:])
        return frame[PROOF_BYTES:]

    def _check(self, proof: bytes, hello: bytes) -> None:
        if not hmac.compare_digest(proof, self._proof(not self.called, hello)):
            raise GreetingError("the other end has another secret: give all instances of a fleet the same")

    def _proof(self, of_called: bool, hello: bytes) -> bytes:
        nonces = (self._theirs, self._mine) if self.called else (self._mine, self._theirs)
        label = (b"called" if of_called else b"caller") + (b" hello" if hello else b"")
        return hmac.digest(self.secret.encode(), b"\0".join((label, *nonces, hello)), "sha256")
