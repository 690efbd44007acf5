from __future__ import annotations

import pytest

from pdmux_ray.metrics.goodput import Slo
from pdmux_ray.report import figures

from .samples import target


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0"),
        (0.01234, "0.0123"),
        (1.234, "1.23"),
        (-1.234, "-1.23"),
        (12345.6, "12,346"),
        (1e-9, "0.00000000100"),
    ],
)
def test_significant_figures_have_no_exponent(value: float | None, text: str) -> None:
    assert figures.significant(value) == text


@pytest.mark.parametrize(("fraction", "text"), [(1.0, "100 %"), (0.9996, "99.9 %"), (0.29, "29 %"), (0.975, "97.5 %")])
def test_a_miss_is_never_rounded_away(fraction: float, text: str) -> None:
    assert figures.percent(fraction) == text


def test_an_slo_is_one_line() -> None:
    assert figures.slo(Slo(ttft_s=0.5, itl_s=0.05)) == "TTFT ≤ 500 ms and p99 of the request's ITLs ≤ 50 ms"
    assert figures.slo(Slo(ttft_s=1.5, ttft_s_per_token=0.0015)) == "TTFT ≤ 1.5 s + 1.5 ms per prompt token"
    assert figures.slo(Slo()) == "none: every complete request is good"


def test_a_goodput_says_what_it_is() -> None:
    assert figures.goodput(target("A").summary).startswith(("4.", "5.", "6.", "7."))
    assert figures.goodput(target("A", rates=(2,)).summary) == "at least 2.00"
    assert figures.goodput(target("A", rates=(16,)).summary) == "below 16.0"
    assert figures.goodput(target("A", rates=(2,), invalid=(2,)).summary) == "unknown"


def test_what_would_move_a_cursor_is_shown_instead() -> None:
    assert figures.printable("a\x1b[2J\r\n\u202eb ü 東") == "a\\x1b[2J\\r\\n\\u202eb ü 東"
