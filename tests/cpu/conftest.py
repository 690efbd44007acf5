"""Fixtures of the tests that need torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdmux_ray.device.base import limit_spinning

limit_spinning()  # before a test module imports torch


@pytest.fixture(scope="session")
def demo_dir() -> Path:
    """The demo model's directory; prepared on first use."""
    from pdmux_ray.model.source import resolve

    return resolve("demo")
