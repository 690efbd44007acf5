from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from pdmux_ray.metrics.goodput import Slo
from pdmux_ray.report import charts, load_charts, load_report, marks
from pdmux_ray.report.marks import Spec
from pdmux_ray.report.page import Block, Chart, Folded, Grid
from tests.unit.report.samples import lifeline, target

STYLE = (Path(load_report.__file__).parent / "page.css").read_text()


def all_charts(blocks: Sequence[Block]) -> list[Chart]:
    found: list[Chart] = []
    for block in blocks:
        if isinstance(block, Grid):
            found += block.charts
        elif isinstance(block, Folded):
            found += all_charts(block.blocks)
    return found


def rows(spec: Spec) -> list[Spec]:
    """Of all data of a chart."""
    inner = [row for layer in spec.get("layer", []) for row in rows(layer)]
    return spec.get("data", {}).get("values", []) + inner


def test_every_colour_is_known_in_light_and_in_dark() -> None:
    both = [target("A", units=True, invalid=(8,)), target("B")]
    blocks = [f(both) for f in (load_charts.over_rate, load_charts.misses, load_charts.latencies, load_charts.over_time)]
    drawn = [chart for found in blocks for chart in all_charts(found)]
    text = json.dumps([*(chart.spec for chart in drawn), marks.CONFIG, *marks.SERIES, *marks.RANKS])
    text += " ".join(key.colour for chart in drawn for key in chart.legend)
    light, dark = STYLE.split("@media (prefers-color-scheme: dark)")
    for name in set(re.findall(r"var\((--[a-z0-9-]+)\)", text)):
        assert f"{name}:" in light
        assert f"{name}:" in dark
    assert not re.search(r"#[0-9a-f]{6}", text)


def test_the_attainment_chart_has_the_measured_shares_with_their_intervals_and_the_goodput() -> None:
    one = target("A")
    share, good = all_charts(load_charts.over_rate([one]))
    points = {row["rate"]: row for row in rows(share.spec) if row.get("valid")}
    assert {rate: row["good"] for rate, row in points.items()} == {run.rate: run.good_fraction for run, _ in one.runs}
    assert all(row["low"] <= row["good"] <= row["high"] for row in points.values())
    assert {"series": "A", "rate": pytest.approx(one.summary.goodput_rps, rel=1e-4)}.items() <= rows(share.spec)[2].items()
    for row in rows(good.spec):
        if "valid" in row:
            assert row["good"] == pytest.approx(points[row["rate"]]["good"] * row["rate"], rel=1e-4)


def test_an_invalid_run_is_a_cross_and_on_no_line() -> None:
    (share, _) = all_charts(load_charts.over_rate([target("A", invalid=(8,))]))
    lines = [layer for layer in share.spec["layer"] if layer["mark"]["type"] == "line"]
    crosses = [layer for layer in share.spec["layer"] if layer["mark"].get("shape") == "cross"]
    assert [row["rate"] for row in rows({"layer": lines})] == [2, 4]
    assert [row["rate"] for row in rows({"layer": crosses})] == [8]
    assert "invalid run" in [key.label for key in share.legend]


def test_misses_of_several_targets_have_the_same_axes() -> None:
    one, other = all_charts(load_charts.misses([target("A"), target("B", rates=(2, 4, 16))]))
    for channel in ("x", "y"):
        assert one.spec["layer"][0]["encoding"][channel] == other.spec["layer"][0]["encoding"][channel]
    assert sum(row["share"] for row in rows(other.spec) if row["rate"] == "2") == pytest.approx(2 / 60, rel=1e-4)


def test_targets_with_common_rates_are_compared_at_these_and_others_each_by_itself() -> None:
    common = all_charts(load_charts.latencies([target("A"), target("B", rates=(4, 8, 16))]))
    assert [chart.title for chart in common] == [f"{m} at {rate} requests/s" for rate in (4, 8) for m in ("TTFT", "ITL")]
    assert [key.label for key in common[0].legend] == ["A", "B"]
    alone = all_charts(load_charts.latencies([target("A"), target("B", rates=(3, 5))]))
    assert [chart.title for chart in alone] == ["TTFT A", "ITL A", "TTFT B", "ITL B"]
    assert [key.label for key in alone[2].legend] == ["3 requests/s", "5 requests/s"]


def test_rates_that_are_left_out_of_a_cdf_are_counted() -> None:
    ttft, _ = all_charts(load_charts.latencies([target("A", rates=[1 + i / 10 for i in range(11)])]))
    assert len(ttft.legend) == load_charts.MAX_CURVES
    assert (ttft.legend[0].label, ttft.legend[-1].label) == ("1 requests/s", "2 requests/s")
    assert "3 rates between these are left out" in ttft.note


def test_an_slo_that_grows_with_the_prompt_is_marked_as_a_band() -> None:
    slo = Slo(ttft_s=0.2, ttft_s_per_token=0.001)
    ttft, _ = all_charts(load_charts.latencies([target("A", slo=slo)]))
    assert any(layer["mark"].get("style") == "limit-band" for layer in ttft.spec["layer"])
    assert any("by prompt" in str(row.get("text")) for row in rows(ttft.spec))


def test_the_units_are_drawn_only_when_there_are_samples() -> None:
    with_units = all_charts(load_charts.over_time([target("A", units=True)]))
    without = all_charts(load_charts.over_time([target("A")]))
    assert sum(chart.title.startswith("Units") for chart in with_units) == 3
    assert sum(chart.title.startswith("Units") for chart in without) == 0


def test_each_run_shows_its_own_units() -> None:
    drawn = all_charts(load_charts.over_time([target("A", rates=(2, 16), units=True)]))
    first, second = (chart for chart in drawn if chart.title.startswith("Units"))
    begins = [
        next(row["units"] for row in rows(c.spec) if row.get("lane") == "prefill" and row["t"] == 0) for c in (first, second)
    ]
    assert begins == [0, 16]


def test_the_run_in_the_open_is_the_highest_rate_that_held() -> None:
    first, *_ = all_charts(load_charts.over_time([target("A")]))
    assert first.title == "ITL over time: A, 4 requests/s"


@pytest.mark.parametrize(
    ("domain_s", "ticks"),
    [((0.015, 0.12), [0.02, 0.05, 0.1]), ((0.0009, 12.0), [0.001, 0.01, 0.1, 1.0, 10.0]), ((0.05, 0.05), [0.05])],
)
def test_logarithmic_axes_have_round_ticks(domain_s: tuple[float, float], ticks: list[float]) -> None:
    assert marks.log_ticks(domain_s) == ticks


def test_an_slo_stretches_an_axis_only_when_it_is_near() -> None:
    assert marks.log_domain([0.01, 0.02], [0.05])[1] == pytest.approx(0.0625)
    assert marks.log_domain([0.01, 0.02], [5.0])[1] == pytest.approx(0.025)
    assert marks.log_domain([]) == pytest.approx((0.008, 1.25))


def test_a_run_without_any_token_has_no_chart_of_latencies() -> None:
    empty = target("A", rates=(2,), count=20)
    for request in empty.runs[0][1]:
        del request.token_s[:]
    assert load_charts.latencies([empty]) == []
    assert load_charts.over_time([empty]) == []


def test_rates_are_coloured_from_first_to_last() -> None:
    assert marks.rank_colours(2) == [marks.RANKS[0], marks.RANKS[-1]]
    assert len(set(marks.rank_colours(8))) == 8
    assert marks.rank_colours(1) == [marks.RANKS[-1]]


def test_a_stall_of_one_request_stands_out_in_the_chart_over_time() -> None:
    one = target("A", rates=(2,))
    one.runs[0][1].append(lifeline(10.0, 0.1, [0.02] * 10 + [3.0] + [0.02] * 5))  # type: ignore[attr-defined]
    chart, *_ = all_charts(load_charts.over_time([one]))
    assert max(row.get("max", 0) for row in rows(chart.spec)) == pytest.approx(3.0)
    assert charts.RAIN_SHARE < 0.2
