"""What each compared server is started with."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from pdmux_ray.bench import ablation, compare_peer, settings
from pdmux_ray.bench.scaled_work import EVERY, mixed
from pdmux_ray.bench.study import (
    ATTAINMENT,
    LEAST_PROBES,
    LEAST_RPS,
    LEAST_SECONDS,
    MOST_SECONDS,
    REQUESTS,
    Extent,
    read_shares,
)
from pdmux_ray.bench.study_rates import LEVEL
from pdmux_ray.config import load_serve_config
from pdmux_ray.errors import ConfigError
from pdmux_ray.metrics.goodput import Slo
from pdmux_ray.tune.grid import decisive
from pdmux_ray.types import Mode

SLO = Slo(ttft_s=0.0, ttft_s_per_token=0.002, itl_s=0.03)


@pytest.mark.parametrize("name", settings.NAMES)
def test_every_target_is_a_valid_configuration(name: str, tmp_path: Path) -> None:
    words = shlex.split(settings.command(name, tmp_path / "profile.json", SLO).format(model="m", port=1))
    overrides = [words[index + 1] for index, word in enumerate(words) if word == "--set"]
    _, config = load_serve_config(settings.CONFIG, overrides)
    assert config.model == "m"
    assert config.engine.mode is Mode(yaml.safe_load(settings.command(name).split("engine.mode=")[1].split()[0]))
    if name in settings.BY_PROFILE:
        assert (config.engine.multiplex.itl_s, config.engine.multiplex.ttft_s) == (0.03, settings.LEAST_TTFT_S)
    assert (config.engine.multiplex.profile is None) is (name in settings.ONE_PASS)


def test_auto_is_compared_with_every_other_mode() -> None:
    words = [word for name in settings.FIXED for word in (settings.ONE_PASS | settings.BY_PROFILE)[name]]
    assert {word.removeprefix("mode=") for word in words if word.startswith("mode=")} == {
        mode.value for mode in Mode if mode is not Mode.AUTO
    }


def test_every_way_that_the_ablation_compares_is_a_target() -> None:
    assert set(ablation.WHAT) <= set(settings.NAMES)


def test_targets_are_checked_before_anything_starts() -> None:
    assert settings.chosen("auto,split,auto", None) == ["auto", "split"]
    with pytest.raises(ConfigError, match="no target 'fast'"):
        settings.chosen("auto,fast", None)
    with pytest.raises(ConfigError, match="--peer"):
        settings.chosen("auto,peer", None)


NAMES = ["prefill_first", "chunked-512", "split", "time_shared", "auto"]


def test_a_comparison_that_has_more_minutes_makes_longer_runs_within_limits() -> None:
    seconds = [Extent.within(minutes, 1, NAMES, 4).seconds for minutes in (1.0, 45.0, 900.0)]
    assert (seconds[0], seconds[2]) == (LEAST_SECONDS, MOST_SECONDS)
    assert seconds[0] < seconds[1] < seconds[2]


def test_a_run_has_enough_requests_but_at_low_rates_no_more_than_its_time_allows() -> None:
    extent = Extent.within(25.0, 1, NAMES, 4)
    assert extent.seconds_at(100.0) == extent.seconds
    assert extent.seconds_at(4.0) * 4.0 == REQUESTS
    assert extent.seconds_at(0.1) == MOST_SECONDS
    assert decisive(ATTAINMENT, LEVEL) == LEAST_RPS * MOST_SECONDS


def test_the_forecast_never_promises_less_than_the_runs_that_no_deadline_spares() -> None:
    runs = 5 * 4 * LEAST_PROBES
    assert Extent.within(1.0, 1, NAMES, 4).slowest_s(NAMES, 4) > runs * MOST_SECONDS


def test_a_wrong_target_ends_the_command_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_peer.main(["--targets", "fast", "--out", str(tmp_path)]) == 2
    assert "no target 'fast'" in capsys.readouterr().err


def test_every_third_request_of_the_mix_is_a_long_prompt_with_a_short_answer() -> None:
    asks = mixed().asks(60, 0)
    assert asks == mixed().asks(90, 0)[:60]
    longs = asks[EVERY - 1 :: EVERY]
    shorts = [ask for index, ask in enumerate(asks) if index % EVERY != EVERY - 1]
    assert min(len(ask.prompt) for ask in longs) > sum(len(ask.prompt) for ask in shorts) / len(shorts)


def test_given_rates_share_the_time_that_searches_would_take() -> None:
    few, many = (Extent.within(20.0, 1, NAMES, 4, shares=read_shares(text)).seconds for text in ("0.5,1", "0.5,1,1.5,2"))
    assert LEAST_SECONDS < 1.5 * many < few < MOST_SECONDS


@pytest.mark.parametrize("text", ["", "0,1", "1,three", "nan", "2.6"])
def test_shares_that_say_nothing_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--shares"):
        read_shares(text)
