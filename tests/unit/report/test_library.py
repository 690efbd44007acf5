from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from pdmux_ray.report import page
from pdmux_ray.report.page import render


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own, for a process that has not read the library yet."""
    monkeypatch.setenv("PDMUX_CACHE", str(tmp_path))
    page._library.cache_clear()
    yield tmp_path / "charts"
    page._library.cache_clear()


def test_a_library_that_was_kept_is_not_made_again(cache: Path) -> None:
    cache.mkdir()
    (cache / f"vega-embed-{version('vl-convert-python')}.js").write_text("kept()")
    assert "kept()" in render("Title", [])
