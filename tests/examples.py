"""How many examples a property is tried with. Every count in a test is that of the profile `full`, which `.ci/run` takes;
`quick`, without a profile, takes a part of it, and `thorough` a multiple."""

from __future__ import annotations

from hypothesis import settings

FULL = 25  # of a property that says nothing itself

settings.register_profile("quick", max_examples=5)
settings.register_profile("full", max_examples=FULL)
settings.register_profile("thorough", max_examples=500)
settings.load_profile("quick")


def tried(examples: int) -> int:
    """So many in `full`. For properties that need more, or can afford fewer, than others."""
    return max(1, examples * settings.default.max_examples // FULL)
