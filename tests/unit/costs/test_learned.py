from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from pdmux_ray.clock import VirtualClock
from pdmux_ray.costs.device import HostTimes
from pdmux_ray.costs.gpu import H200, LLAMA_8B, parameters
from pdmux_ray.costs.learned import LEAST_TIMES, Seen, learned, pauses, read
from pdmux_ray.engine.timeline import Arrival, PrefillBlock, Step
from pdmux_ray.errors import ConfigError
from pdmux_ray.latency.correction import CorrectedCosts
from pdmux_ray.latency.model import FittedCosts
from pdmux_ray.metrics.trace import Source, chrome_trace

ALL = H200.units
BASE = FittedCosts(parameters(H200, LLAMA_8B))
HOST_S = 0.0004


def seen(
    kind: str,
    times: float,
    profiled_s: float = 0.01,
    *,
    units: int = ALL,
    steps: int = 100,
    decodes: int = 4,
    token_s: float = 0.0,
) -> list[Seen]:
    took_s = times * profiled_s + token_s * decodes
    return [Seen(kind, units, 0, begin_s, begin_s + took_s, profiled_s, decodes) for begin_s in map(float, range(steps))]


def test_a_step_takes_as_much_longer_as_those_of_its_kind_units_and_size_took() -> None:
    found = learned([[*seen("decode", 1.5), *seen("decode", 1.2, 0.02), *seen("mixed", 1.2)]], HostTimes(), "here")
    assert found.of("decode", ALL, 0, 0.02, 4) == pytest.approx(1.2)
    assert found.of("decode", ALL, 0, 0.01, 4) == pytest.approx(1.5)
    assert found.of("decode", ALL, 0, 0.001, 4) == pytest.approx(1.3)  # of another size
    assert found.of("decode", 8, 124, 0.02, 4) == pytest.approx(1.3)  # of other units
    assert found.of("mixed", ALL, 0, 0.02, 4) == pytest.approx(1.2)
    assert found.of("prefill", ALL, 0, 0.02, 0) == pytest.approx(1.275)  # of which there was none


def test_what_each_token_costs_is_told_apart_from_what_a_step_does() -> None:
    steps = [one for decodes in (1, 2, 5) for one in seen("decode", 1.2, decodes=decodes, token_s=0.0005)]
    found = learned([steps], HostTimes(), "here")
    assert found.of("decode", ALL, 0, 0.01, 20) == pytest.approx(1.2 + 20 * 0.05)
    assert "decode 1.2 and 0.5 ms a token" in str(found)


def test_more_requests_never_make_a_step_faster() -> None:
    found = learned(
        [[*seen("decode", 1.4, decodes=1, steps=300), *seen("decode", 1.2, decodes=4, steps=300)]], HostTimes(), "here"
    )
    assert found.of("decode", ALL, 0, 0.01, 1) == found.of("decode", ALL, 0, 0.01, 9) == pytest.approx(1.3)


def test_what_was_seen_seldom_does_not_count_by_itself() -> None:
    few = seen("decode", 1.5, 0.02, steps=LEAST_TIMES - 1)
    together = (31 * 1.5 * 0.02 + 100 * 1.2 * 0.01) / (31 * 0.02 + 100 * 0.01)
    assert learned([[*seen("decode", 1.2), *few]], HostTimes(), "here").of("decode", ALL, 0, 0.02, 4) == pytest.approx(together)
    with pytest.raises(ConfigError, match=r"here: .* learned from 31 steps, which is too few"):
        learned([few], HostTimes(), "here")


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
    assert found.host == HostTimes(pytest.approx(HOST_S, rel=0.02), pytest.approx(HOST_S, rel=0.02))
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
    records = [
        Step("step", 0, 1.0, 1.01, *decodes),
        Step("step", 0, 1.0103, 1.02, *decodes),
        PrefillBlock("block", 0, 1.0207, 1.03, *block),
        Arrival("arrival", 0, 2.0, "next", 9),
        Step("step", 0, 2.1, 2.11, *decodes),
    ]
    trace = chrome_trace([Source("one", ALL, records)], 3.0)
    assert list(pauses(trace, "one")) == [(False, pytest.approx(0.0003)), (True, pytest.approx(0.0007))]
