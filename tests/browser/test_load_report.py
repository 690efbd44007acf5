"""Reports in a real browser: offline, on a desk and on a phone, in light and in dark."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Page

from pdmux_ray.report.load_report import write_report

from ..unit.report.samples import target
from .conftest import Reader, settle

pytestmark = pytest.mark.browser

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\" onmouseover='alert(3)' {{ 7 * 7 }}"
MARKS = "g.mark-line path, g.mark-symbol path, g.mark-rect path, g.mark-rule line, g.mark-area path"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    targets = [target("pdmux", units=True), target("peer", tokens=30, invalid=(8,))]
    return write_report(tmp_path_factory.mktemp("report"), "A comparison", targets, ["Every length is divided by 8."])


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    targets = [target(HOSTILE * 3, error=HOSTILE, units=True, invalid=(8,), why=HOSTILE), target(HOSTILE, error=HOSTILE)]
    return write_report(tmp_path_factory.mktemp("hostile"), HOSTILE, targets, [HOSTILE])


def colour(page: Page, property_of: str, name: str = "background-color") -> str:
    return str(page.eval_on_selector(property_of, f"e => getComputedStyle(e).getPropertyValue('{name}')"))


def luminance(css: str) -> float:
    """0 black, 1 white, of `rgb(r, g, b)`."""
    red, green, blue = (int(part) / 255 for part in css.removeprefix("rgb(").removesuffix(")").split(",")[:3])
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def open_all(page: Page) -> None:
    page.evaluate("for (const details of document.querySelectorAll('details')) details.open = true")
    settle(page)


def test_every_chart_is_drawn_with_marks_also_those_that_are_folded(report: Path, reader: Reader) -> None:
    page = reader.open(report)
    open_all(page)
    counts = page.eval_on_selector_all("figure", f"all => all.map(f => f.querySelectorAll('{MARKS}').length)")
    assert len(counts) >= 15
    assert min(counts) >= 3
    assert page.eval_on_selector_all(".chart.failed", "all => all.length") == 0


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_nothing_runs_over_the_side(report: Path, hostile: Path, reader: Reader, width: int) -> None:
    for file in (report, hostile):
        page = reader.open(file, width)
        open_all(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        over = page.eval_on_selector_all(
            ".chart svg", "all => all.filter(s => s.getBoundingClientRect().right > innerWidth).length"
        )
        assert over == 0


def test_no_text_of_a_chart_is_cut_off(report: Path, reader: Reader) -> None:
    """By the edge of its drawing."""
    cut = """all => all.flatMap(svg => {
        const box = svg.getBoundingClientRect();
        return [...svg.querySelectorAll('text')].filter(t => t.textContent && t.getBoundingClientRect().width).filter(t => {
            const r = t.getBoundingClientRect();
            return r.left < box.left - 1 || r.right > box.right + 1 || r.top < box.top - 1 || r.bottom > box.bottom + 1;
        }).map(t => t.textContent);
    })"""
    for width in (390, 1280):
        page = reader.open(report, width)
        assert page.eval_on_selector_all(".chart svg", cut) == []


def test_a_wide_table_scrolls_within_itself_and_by_keyboard(report: Path, reader: Reader) -> None:
    page = reader.open(report, 390)
    wide = page.eval_on_selector_all(".scroll", "all => all.filter(s => s.scrollWidth > s.clientWidth).map(s => s.tabIndex)")
    assert wide
    assert set(wide) == {0}


def test_charts_follow_the_width_of_the_window(report: Path, reader: Reader) -> None:
    page = reader.open(report, 1280)
    before = page.eval_on_selector(".chart svg", "s => s.getBoundingClientRect().width")
    page.set_viewport_size({"width": 390, "height": 900})
    page.wait_for_function(f"document.querySelector('.chart svg').getBoundingClientRect().width < {before} - 100")
    page.wait_for_function("document.documentElement.scrollWidth <= 390")
    assert page.eval_on_selector(".chart svg", "s => s.getBoundingClientRect().width") < before - 100


def test_light_and_dark_follow_the_reader_also_when_they_change(report: Path, reader: Reader) -> None:
    page = reader.open(report, scheme="light")
    label = ".chart svg g.role-axis-label text"
    light = luminance(colour(page, "body")), luminance(colour(page, label, "fill"))
    page.emulate_media(color_scheme="dark")
    dark = luminance(colour(page, "body")), luminance(colour(page, label, "fill"))
    assert light[0] > 0.9 > light[1] + 0.4
    assert dark[0] < 0.1 < dark[1] - 0.4


def test_names_and_errors_do_not_execute_not_even_in_a_tooltip(hostile: Path, reader: Reader) -> None:
    page = reader.open(hostile)
    open_all(page)
    page.locator(".chart g.mark-symbol path").first.hover(force=True)
    page.wait_for_selector("#vg-tooltip-element.visible")
    assert "<script>alert(1)" in page.inner_text("#vg-tooltip-element")
    assert page.eval_on_selector_all("img, [onerror], [onmouseover]", "all => all.length") == 0
    assert page.inner_text("h1") == HOSTILE


def test_the_pages_policy_stops_even_a_script_that_got_into_it(report: Path, tmp_path: Path, reader: Reader) -> None:
    set_it = "window.smuggled = 1"
    smuggled = f"<script>{set_it}</script><img src='data:,' onerror='{set_it}'>"
    (file := tmp_path / "report.html").write_text(report.read_text().replace("</footer>", f"</footer>{smuggled}"))
    page = reader.open(file)
    assert page.evaluate("window.smuggled") is None
    assert len(reader.complaints) == 2
    assert all("Content Security Policy" in complaint for complaint in reader.complaints)
    reader.complaints.clear()


def test_without_scripts_the_figures_are_there_as_tables(report: Path, reader: Reader) -> None:
    page = reader.open(report, scripts=False)
    assert "The charts need JavaScript" in page.inner_text("header")
    assert page.locator(".chart").first.is_hidden()
    for caption in ("Good requests over rate", "Misses of pdmux", "Quantiles of TTFT at 2 requests/s, ms"):
        assert page.locator("caption", has_text=caption).first.is_visible()


def test_an_invalid_run_is_the_first_thing_that_a_reader_sees(report: Path, reader: Reader) -> None:
    page = reader.open(report, 390)
    alarm = page.locator("[role=alert]")
    assert "1 run is invalid and must not be used" in alarm.inner_text()
    box = alarm.bounding_box()
    assert box is not None
    assert box["y"] < 400


def test_a_report_of_two_million_tokens_is_small_and_draws(tmp_path: Path, reader: Reader) -> None:
    file = write_report(tmp_path, "Large", [target("A", rates=(8,), count=10_000, tokens=200, units=True)])
    assert file.stat().st_size < 1_500_000
    page = reader.open(file)
    assert page.eval_on_selector_all(".chart[data-state=drawn]", "all => all.length") >= 7
