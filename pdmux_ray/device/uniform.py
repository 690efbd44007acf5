"""The only randomness of sampling: one number per token, a pure function of (seed, position). Stdlib only."""

from __future__ import annotations

_MASK = 2**64 - 1


def _mix(x: int) -> int:
    """splitmix64's output function: a bijection of 64-bit integers with well-scattered bits."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


def uniform(seed: int, position: int) -> float:
    """In [0, 1), a multiple of 2**-53. `position` is that of the token being sampled (the number of tokens before it)."""
    return (_mix(_mix(seed & _MASK) + position * 0x9E3779B97F4A7C15 & _MASK) >> 11) * 2.0**-53
