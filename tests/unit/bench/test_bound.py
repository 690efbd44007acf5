"""How good predictions were, from a server's timeline."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdmux_ray.bench import bound
from pdmux_ray.bench.bound import TimedWork
from pdmux_ray.bench.timeline import Fetched
from pdmux_ray.engine import timeline
from pdmux_ray.errors import ConfigError
from pdmux_ray.metrics.trace import Source, chrome_trace


def fetched(*records: timeline.Record, offset_s: float = 0.0) -> Fetched:
    return Fetched(chrome_trace([Source("one", 2, records)], 100.0), offset_s)


def decodes(begin_s: float, took_s: float, predicted_s: float | None, bound_s: float | None) -> timeline.Step:
    facts = ("lanes_both", "split", "fits", 1, 1, 3, 0, 0)
    return timeline.Step("step", 0, begin_s, begin_s + took_s, *facts, predicted_s, bound_s)


def one_pass(begin_s: float, decoding: int) -> timeline.Step:
    facts = ("chunk_mixed", "chunked", None, 2, 2, decoding, 64, 0)
    return timeline.Step("step", 0, begin_s, begin_s + 0.05, *facts, 0.04, 0.06)


def block(begin_s: float) -> timeline.PrefillBlock:
    return timeline.PrefillBlock("block", 0, begin_s, begin_s + 0.1, "capped", "slack", 1, 2, 7, 0, 4, 512, 0.09, 0.11)


def told(measured_s: float, bound_s: float = 1.1) -> TimedWork:
    return TimedWork("decode", "split", 1.0, bound_s, measured_s)


def test_each_step_of_a_timeline_counts_once_whatever_lanes_it_shows_on() -> None:
    found = bound.steps_of(fetched(decodes(1.0, 0.02, 0.019, 0.022), one_pass(2.0, 3), one_pass(3.0, 0), block(4.0)), 0.0)
    assert [(step.kind, step.mode) for step in sorted(found)] == [
        ("block", "capped"),
        ("decode", "split"),
        ("pass", "chunked"),
        ("pass", "chunked"),
    ]
    assert next(step for step in found if step.kind == "decode")[2:] == pytest.approx((0.019, 0.022, 0.02))


def test_steps_from_before_the_run_are_left_out_on_the_clients_clock() -> None:
    found = bound.steps_of(fetched(decodes(1.0, 0.02, None, None), decodes(2.0, 0.03, None, None), offset_s=10.0), 11.5)
    (step,) = found
    assert step.predicted_s is None
    assert step.measured_s == pytest.approx(0.03)


@pytest.mark.parametrize(("over", "error", "holds"), [(2, 0.05, True), (3, 0.05, False), (0, 0.15, False)])
def test_the_limits_are_2_percent_of_steps_and_10_percent_of_error(over: int, error: float, holds: bool) -> None:
    steps = [told(1.0 / (1 - error), 0.5 if index < over else 2.0) for index in range(100)]
    lines, held = bound.table({"auto": steps})
    assert held is holds
    assert f"{over / 100:.1%}" in lines[-1]


def test_without_predictions_nothing_holds() -> None:
    assert bound.table({"prefill_first": [TimedWork("pass", "prefill_first", None, None, 1.0)]})[1] is False


def test_modes_are_told_by_the_time_of_prefill_work() -> None:
    steps = [TimedWork("block", "split", None, None, 3.0), TimedWork("pass", "chunked", None, None, 1.0), told(100.0)]
    assert bound.mode_shares(steps) == {"split": 0.75, "chunked": 0.25}


def test_steps_come_back_from_their_files_by_target(tmp_path: Path) -> None:
    bound.append(tmp_path / "loogle" / "auto", [told(1.0)])
    bound.append(tmp_path / "sharegpt" / "auto", [told(1.05)])
    bound.append(tmp_path / "sharegpt" / "split", [TimedWork("block", "split", None, None, 1.0)])
    assert bound.read_all(tmp_path) == {
        "auto": [told(1.0), told(1.05)],
        "split": [TimedWork("block", "split", None, None, 1.0)],
    }
    assert bound.main([str(tmp_path)]) == 0
    (tmp_path / "sharegpt" / "auto" / bound.FILE).write_text("[1]\n")
    with pytest.raises(ConfigError, match="line 1 is no step"):
        bound.read_all(tmp_path)
    assert bound.main([str(tmp_path)]) == 2
