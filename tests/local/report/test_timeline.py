from __future__ import annotations

from pdmux_ray.engine.timeline import Arrival, PrefillBlock, Record, Step
from pdmux_ray.metrics.lane_units import UnitsChange
from pdmux_ray.metrics.trace import Source, Trace, chrome_trace
from pdmux_ray.report.series import UNIT_STEPS, UnitsSample, Window
from pdmux_ray.report.timeline import build, samples_of

from .test_page import HOSTILE, Elements


def step(begin_s: float, end_s: float, predicted_s: float, bound_s: float) -> Step:
    return Step("step", 0, begin_s, end_s, "lanes_both", "split", "fits", 3, 1, 2, 0, 0, predicted_s, bound_s)


def block(begin_s: float, end_s: float) -> PrefillBlock:
    return PrefillBlock("block", 0, begin_s, end_s, "split", "fits", 3, 1, 7, 0, 12, 700, None, None)


def both(begin_s: float, end_s: float) -> Step:
    """Decodes with every unit, beside a prefill that is capped."""
    return Step("step", 0, begin_s, end_s, "lanes_both", "capped", "fits", 3, 4, 2, 0, 0, None, None)


def trace_of(*records: Record, name: str = "one") -> Trace:
    return chrome_trace([Source(name, 4, records)], 99.0)


def words(trace: Trace) -> str:
    return " ".join(" ".join(Elements(build("Timeline", trace)).text).split())


def test_the_picture_has_the_units_the_arrivals_and_a_row_for_what_each_lane_did() -> None:
    steps = [step(0.0, 1.0, 0.9, 1.1), step(1.0, 2.0, 0.8, 0.9), step(2.0, 3.0, 1.0, 1.1), step(3.0, 4.0, 1.0, 1.1)]
    page = build("Timeline", trace_of(Arrival("arrival", 0, 0.5, "r", 321), *steps, block(1.0, 3.0)))
    found = " ".join(" ".join(Elements(page).text).split())
    assert '"tokens":321' in page
    assert "decode, split, fits 4 100 % 1,000 5 % 25 %" in found
    assert "prefill, split, fits 1 50 % 2,000 – –" in found


def test_lanes_that_overlap_are_said_to_share_units() -> None:
    assert "more than the device's 4 units together, they share some" in words(trace_of(block(0.0, 1.0), both(0.0, 1.0)))
    assert "share some" not in words(trace_of(block(0.0, 1.0), step(0.0, 1.0, 0.9, 1.1)))


def test_an_instance_that_did_nothing_or_did_not_answer_is_named() -> None:
    assert "Instance one It did nothing in this time." in words(trace_of())
    assert "two: it hangs." in words(chrome_trace([], 9.0, {"two": "it hangs"}))
    assert "No instance was linked." in words(chrome_trace([], 9.0))


def test_names_stay_text() -> None:
    elements = Elements(build(HOSTILE, trace_of(step(0.0, 1.0, 1.0, 1.0), name=HOSTILE)))
    assert "img" not in {tag for tag, _ in elements.tags}
    assert not any(name.startswith("on") for _, attributes in elements.tags for name in attributes)


def test_few_changes_are_shown_as_they_are_and_many_as_means_over_time() -> None:
    window = Window(0.0, 10.0)
    assert samples_of([UnitsChange(-1.0, 9, 9), UnitsChange(2.0, 3, 1)], window, 5) == [UnitsSample(2.0, 3, 1, 5)]
    at_once = [UnitsChange(2.0, 3, 1), UnitsChange(4.0, 0, 1), UnitsChange(4.0001, 0, 4)]
    assert samples_of(at_once, window) == [UnitsSample(2.0, 3, 1), UnitsSample(4.0, 0, 4)]
    many = [UnitsChange(10.0 * i / 2000, 4 * (i % 2), 4 * ((i + 1) % 2)) for i in range(2000)]
    samples = samples_of(many, window)
    assert len(samples) == UNIT_STEPS
    assert {(round(s.prefill_units, 1), round(s.decode_units, 1)) for s in samples} <= {(2.4, 1.6), (1.6, 2.4), (2.0, 2.0)}
