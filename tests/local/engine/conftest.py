"""Engines as unit tests have them."""

from __future__ import annotations

from tests.unit.engine.conftest import worlds as worlds
