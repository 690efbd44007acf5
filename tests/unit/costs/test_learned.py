from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random
from statistics import stdev

import pytest

from pdmux_ray.clock import VirtualClock
from pdmux_ray.costs.gpu import H200, LLAMA_8B, parameters
from pdmux_ray.costs.learned import LEAST_TIMES, learned, read
from pdmux_ray.engine.timeline import Step
from pdmux_ray.errors import ConfigError
from pdmux_ray.latency.correction import CorrectedCosts, Lesson
from pdmux_ray.latency.model import FittedCosts
from pdmux_ray.metrics.trace import Source, chrome_trace

ALL = H200.units


def lesson(kind: str, factor: float, size: int | None = None, units: int = ALL, times: int = 100) -> Lesson:
    return Lesson(kind, units, 0, size, factor, times)


def test_a_step_takes_as_much_longer_as_the_server_has_learned_of_its_kind_units_and_size() -> None:
    lessons = [lesson("decode", 1.5), lesson("decode", 1.2, size=2), lesson("mixed", 1.1)]
    found = learned(lessons, [1.0], "here")
    assert found.of("decode", ALL, 0, 0.02) == pytest.approx(1.2)
    assert found.of("decode", ALL, 0, 0.001) == pytest.approx(1.5)  # of another size
    assert found.of("decode", 8, 124, 0.02) == pytest.approx(1.5)  # of other units
    assert found.of("mixed", ALL, 0, 0.02) == pytest.approx(1.1)
    assert found.of("prefill", ALL, 0, 0.02) == pytest.approx(math.sqrt(1.5 * 1.1))  # of which there was none


def test_lessons_of_few_times_do_not_count_and_those_of_instances_count_by_their_times() -> None:
    few = lesson("decode", 9.0, size=2, times=LEAST_TIMES - 1)
    found = learned([lesson("decode", 1.0, times=300), lesson("decode", 2.0, times=100), few], [1.0], "here")
    assert found.of("decode", ALL, 0, 0.02) == pytest.approx(2**0.25)
    with pytest.raises(ConfigError, match=r"here: .* learned from 3 steps, which is too few"):
        learned([lesson("decode", 1.5, times=3)], [1.0], "here")


def timeline(factor: float, spread: float) -> dict[str, object]:
    """Of an instance whose steps take so many times what is predicted."""
    base, rng, clock = FittedCosts(parameters(H200, LLAMA_8B)), Random(1), VirtualClock()
    costs, records = CorrectedCosts(base), []
    for number in range(400):
        took_s = base.decode(8, 8000, ALL, 0).predicted_s * factor * rng.lognormvariate(0.0, spread)
        predicted_s, bound_s = costs.decode(8, 8000, ALL, 0)
        begin_s = clock.now()
        clock.sleep(took_s)
        records.append(_step(number, begin_s, clock.now(), predicted_s, bound_s))
        costs.observe_decode(8, 8000, ALL, 0, took_s)
    return chrome_trace([Source("one", ALL, records, lessons=costs.lessons())], clock.now())


def _step(number: int, begin_s: float, end_s: float, predicted_s: float, bound_s: float) -> Step:
    return Step("step", number, begin_s, end_s, "no_prefill", "split", None, 0, ALL, 8, 0, 0, predicted_s, bound_s)


def test_a_timeline_tells_by_how_much_and_how_far_steps_scatter(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps(timeline(1.3, 0.1)))
    found = read([tmp_path / "t.json"])
    assert found.of("decode", ALL, 0, 0.006) == pytest.approx(1.3, rel=0.06)
    assert len(found.residuals) == 400
    assert stdev(map(math.log, found.residuals[100:])) == pytest.approx(0.1, rel=0.2)
    assert "learned from 400 steps" in str(found)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"otherData": {"instances": {"a": {"lessons": [[1]]}}}}'])
def test_a_file_that_is_no_timeline_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ConfigError, match="no timeline of a server"):
        read([tmp_path / "t.json"])


def test_a_timeline_of_a_server_without_a_profile_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps(chrome_trace([Source("one", ALL, [])], 1.0)))
    with pytest.raises(ConfigError, match="must plan by a profile"):
        read([tmp_path / "t.json"])
