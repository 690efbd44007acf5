"""docs/literature.md has what the command prints: of the comparisons in closed form, which take a second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pdmux_ray.bench.literature import estimates, transfer
from pdmux_ray.bench.literature.fleets import StepTimes
from pdmux_ray.bench.literature.rows import Comparison

pytestmark = pytest.mark.cpu
PAGE = (Path(__file__).parents[2] / "docs" / "literature.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("compare", [transfer.compare, estimates.compare])
def test_the_page_has_what_the_command_prints(compare: Callable[[StepTimes], Comparison]) -> None:
    """But for where its lines end."""
    words = " ".join(PAGE.split())
    assert [line for line in compare(StepTimes()).lines() if " ".join(line.split()) not in words] == []
