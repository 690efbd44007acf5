from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from pdmux_ray.clock import VirtualClock
from pdmux_ray.costs.device import HostTimes
from pdmux_ray.costs.gpu import H200, LLAMA_8B, parameters
from pdmux_ray.costs.learned import LEAST_LIKE, LEAST_TIMES, Seen, learned, pauses, read
from pdmux_ray.engine.timeline import Arrival, PrefillBlock, Record, Step
from pdmux_ray.errors import ConfigError
from pdmux_ray.latency.correction import CorrectedCosts
from pdmux_ray.latency.model import FittedCosts
from pdmux_ray.metrics.trace import Source, chrome_trace

ALL = H200.units
BASE = FittedCosts(parameters(H200, LLAMA_8B))
HOST_S = 0.0004


def seen(
    kind: str, times: float = 1.0, step_s: float = 0.0, token_s: float = 0.0, *, units: int = ALL, steps: int = LEAST_LIKE
) -> list[Seen]:
    """Of work of all sizes, with few and with many requests."""
    found = []
    for step in range(steps):
        profiled_s, decodes = 0.005 * (1 + step % 7), 0 if kind == "prefill" else 1 + step % 5
        took_s = times * profiled_s + step_s + token_s * decodes
        found.append(Seen(kind, units, 0, float(step), step + took_s, profiled_s, decodes))
    return found


def law(*servers: list[Seen]) -> Callable[..., float]:
    return learned(servers, HostTimes(), "here").of


def test_what_a_step_its_size_and_its_tokens_cost_more_than_the_profile_says_is_told_apart() -> None:
    of = law(seen("decode", 1.2, 0.001, 0.0003))
    assert of("decode", ALL, 0, 0.01, 0) == pytest.approx(1.2 + 0.1)
    assert of("decode", ALL, 0, 0.1, 0) == pytest.approx(1.2 + 0.01)
    assert of("decode", ALL, 0, 0.01, 20) == pytest.approx(1.2 + 0.1 + 0.6)


def test_what_was_seen_seldom_is_as_what_is_most_like_it() -> None:
    of = law([*seen("decode", 1.5), *seen("decode", 1.1, units=8, steps=LEAST_LIKE - 1), *seen("mixed", 9.0, steps=1)])
    assert of("decode", ALL, 0, 0.01, 3) == pytest.approx(1.5)
    assert 1.1 < of("decode", 8, 0, 0.01, 3) == of("decode", 64, 68, 0.01, 3) < 1.5  # as decodes
    assert 1.1 < of("mixed", ALL, 0, 0.01, 3) == of("prefill", ALL, 0, 0.01, 3) < 1.6  # as everything


def test_nothing_is_faster_in_a_server_than_in_its_profile() -> None:
    assert law(seen("decode", 0.8))("decode", ALL, 0, 0.01, 3) == 1.0


def test_a_server_that_has_hardly_worked_teaches_nothing() -> None:
    with pytest.raises(ConfigError, match=r"here: .* learned from 31 steps, which is too few"):
        law(seen("decode", steps=LEAST_TIMES - 1))


def test_a_server_that_was_slower_than_the_other_stays_so_in_the_pace() -> None:
    found = learned([seen("decode", 1.0), seen("decode", 1.5)], HostTimes(), "here")
    assert found.of("decode", ALL, 0, 0.01, 4) == pytest.approx(1.25)
    assert found.pace is not None
    first, second = (found.pace.lasts_s(found.pace.length_s * share, 0.01) for share in (0.2, 0.8))
    assert (first, second) == pytest.approx((0.008, 0.012))
    assert "of 2 servers, 1 to 1.5 by server" in str(found)


def timeline(steps: int = 400) -> dict[str, object]:
    """Of an instance whose steps take 1.3 times what is predicted, about; ten in a row now and then three times that."""
    rng, clock = Random(1), VirtualClock()
    costs, records = CorrectedCosts(BASE), []
    for number in range(steps):
        stalled = 3.0 if number % 100 >= 90 else 1.0
        took_s = BASE.decode(8, 8000, ALL, 0).predicted_s * 1.3 * stalled * rng.lognormvariate(0.0, 0.05)
        predicted_s, bound_s = costs.decode(8, 8000, ALL, 0)
        begin_s = clock.now()
        clock.sleep(took_s)
        records.append(_step(number, begin_s, clock.now(), predicted_s, bound_s))
        costs.observe_decode(8, 8000, ALL, 0, took_s)
        clock.sleep(HOST_S)
    return chrome_trace([Source("one", ALL, records, lessons=costs.lessons())], clock.now())


def _step(number: int, begin_s: float, end_s: float, predicted_s: float, bound_s: float) -> Step:
    decodes = ("decode_only", "chunked", "no_prefill", ALL, ALL, 8, 0, 0)
    return Step("step", number, begin_s, end_s, *decodes, predicted_s, bound_s)


def test_a_timeline_tells_by_how_much_when_and_what_the_host_takes(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps(timeline()))
    found = read([tmp_path / "t.json"], BASE)
    mean = 1.3 * 1.2
    assert found.of("decode", ALL, 0, 0.006, 8) == pytest.approx(mean, rel=0.02)
    assert (found.host.step_s, found.host.lanes_s) == pytest.approx((HOST_S, HOST_S), rel=0.02)
    assert found.pace is not None
    begins_s = found.pace.begins_s
    assert len(begins_s) == 400
    assert found.pace.lasts_s(0.0, 0.1) == pytest.approx(0.1 * 1.3 / mean, rel=0.05)
    stall_s = begins_s[100] - begins_s[90]
    assert found.pace.lasts_s(begins_s[90], stall_s / 3) == pytest.approx(stall_s * 1.3 / mean, rel=0.05)  # it lasts
    assert "from 400 steps" in str(found)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"otherData": {"instances": {"a": {"lessons": [[1]]}}}}'])
def test_a_file_that_is_no_timeline_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ConfigError, match="no timeline of a server"):
        read([tmp_path / "t.json"], BASE)


def test_a_timeline_of_a_server_without_a_profile_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps(chrome_trace([Source("one", ALL, [])], 1.0)))
    with pytest.raises(ConfigError, match="must plan by a profile"):
        read([tmp_path / "t.json"], BASE)


def test_the_host_is_counted_before_what_it_launches_but_not_while_nobody_asks() -> None:
    decodes = ("decode_only", "chunked", "no_prefill", ALL, ALL, 8, 0, 0, 0.01, 0.02)
    block = ("split", "slack", ALL, 0, 1, 0, 4, 64, 0.01, 0.02)
    records: list[Record] = [
        Step("step", 0, 1.0, 1.01, *decodes),
        Step("step", 0, 1.0103, 1.02, *decodes),
        PrefillBlock("block", 0, 1.0207, 1.03, *block),
        Arrival("arrival", 0, 2.0, "next", 9),
        Step("step", 0, 2.1, 2.11, *decodes),
    ]
    trace = chrome_trace([Source("one", ALL, records)], 3.0)
    on_lanes, seconds = zip(*pauses(trace, "one"), strict=True)
    assert on_lanes == (False, True)
    assert seconds == pytest.approx((0.0003, 0.0007))
