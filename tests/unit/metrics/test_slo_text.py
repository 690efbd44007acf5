from __future__ import annotations

import pytest

from pdmux_ray.errors import ConfigError
from pdmux_ray.metrics.goodput import Slo
from pdmux_ray.metrics.slo_text import SloText, SoloLatency

SOLO = SoloLatency(ttft_s=0.02, ttft_s_per_token=0.001, itl_s=0.01)


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("ttft=0.5,itl=50ms", Slo(0.5, 0.05)),
        ("ttft=200ms+1.5ms/token", Slo(0.2, None, 0.0015)),
        ("itl.p90=50ms", Slo(None, 0.05, itl_statistic="p90")),
        (" itl.mean = 20000us , ttft = 1s ", Slo(1.0, 0.02, itl_statistic="mean")),
    ],
)
def test_limits_are_read_with_their_units(text: str, slo: Slo) -> None:
    parsed = SloText.parse(text)
    assert (parsed.resolve(None), parsed.needs_solo) == (slo, False)


def test_multiples_of_an_idle_server_become_seconds_once_it_is_measured() -> None:
    parsed = SloText.parse("ttft=5x,itl.p90=3x")
    assert parsed.needs_solo
    resolved = parsed.resolve(SOLO)
    assert resolved.ttft_limit_s(100) == pytest.approx(5 * (0.02 + 0.1))
    assert (resolved.itl_s, resolved.itl_statistic) == (pytest.approx(0.03), "p90")


def test_a_multiple_and_a_fixed_limit_go_together() -> None:
    resolved = SloText.parse("ttft=1s+2ms/token,itl=2x").resolve(SOLO)
    assert (resolved.ttft_s, resolved.ttft_s_per_token, resolved.itl_s) == (1.0, 0.002, pytest.approx(0.02))


def test_multiples_need_a_server_to_measure() -> None:
    with pytest.raises(ConfigError, match="State it in seconds"):
        SloText.parse("ttft=5x").resolve(None)


@pytest.mark.parametrize(
    "text",
    [
        *("", "ttft", "ttft=", "ttft=0", "ttft=-1", "ttft=1m", "ttft=nan", "ttft=inf", "ttft=1e3", "ttft=0x", "latency=1"),
        *("ttft=1,ttft=2", "ttft.p99=1", "itl.p42=1", "ttft=1+2ms", "ttft=2x+1ms/token", "itl=1ms+1ms/token", "ttft=1,"),
    ],
)
def test_what_is_no_slo_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        SloText.parse(text)
