"""How many examples a property is tried with is said in `tests/examples.py`, by profile: `--hypothesis-profile`."""

from __future__ import annotations

import tests.examples  # noqa: F401  # registers the profiles
