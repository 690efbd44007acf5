"""How many examples a property is tried with, unless it says so itself: `--hypothesis-profile thorough` tries more."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("quick", max_examples=25)
settings.register_profile("thorough", max_examples=500)
settings.load_profile("quick")
