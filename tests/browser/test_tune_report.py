"""The page of `pdmux tune`, in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdmux_ray.bench import tune_report
from pdmux_ray.tune.candidates import Kind, Space
from pdmux_ray.tune.estimate import Work
from pdmux_ray.tune.fake_trials import FakeTrials
from pdmux_ray.tune.search import Search, Variant
from pdmux_ray.tune.trial import Changes
from pdmux_ray.types import Mode

from .conftest import Reader

pytestmark = pytest.mark.browser

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.mark.parametrize("width", [390, 1280])
def test_the_ratio_is_drawn_and_nothing_runs_over_the_side(width: int, tmp_path: Path, reader: Reader) -> None:
    trials = FakeTrials(lambda candidate, changes: 2.0 if candidate.topology.kind is Kind.MIXED else 1.0)
    space, variants = Space(4, (1,), (Mode.AUTO, Mode.CHUNKED), (512,)), (Variant(HOSTILE, "1", Changes(spread=2.0)),)
    outcome = Search(space, {1: Work(1.0, 1.0)}, trials.submit, 0.9, 1, variants=lambda found: variants).run()
    path = tmp_path / "report.html"
    path.write_text(tune_report.page(HOSTILE, outcome, [HOSTILE], [HOSTILE], HOSTILE))
    page = reader.open(path, width)
    marks = "g.mark-line path, g.mark-symbol path"
    drawn = page.eval_on_selector_all("figure", f"all => all.map(f => f.querySelectorAll('{marks}').length)")
    assert len(drawn) == 1
    assert drawn[0] >= 4
    assert page.evaluate("document.documentElement.scrollWidth") <= width
