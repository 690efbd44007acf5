from __future__ import annotations

import pytest

from pdmux_ray.config import AppConfig, parse_app_config
from pdmux_ray.errors import ConfigError, RequestError
from pdmux_ray.metrics.goodput import Slo
from pdmux_ray.metrics.tiers import tier_of, tiers_of

BATCH = {"ttft_s": 10.0, "itl_s": 0.5, "itl_statistic": "mean"}


def config(slo: object, **multiplex: object) -> AppConfig:
    return parse_app_config({"engine": {"multiplex": multiplex}, "gateway": {"slo": slo}})


def test_the_default_tier_has_the_objectives_that_the_engine_schedules_by() -> None:
    found = tiers_of(config({"batch": BATCH}, ttft_s=0.5, ttft_s_per_token=0.001, itl_s=0.05))
    assert found == {"default": Slo(0.5, 0.05, 0.001), "batch": Slo(10.0, 0.5, 0.0, "mean")}


def test_a_default_tier_that_is_given_stands() -> None:
    assert tiers_of(config({"default": {"itl_s": 0.1}}, ttft_s=0.5)) == {"default": Slo(itl_s=0.1)}


def test_without_objectives_only_errors_and_cut_answers_are_misses() -> None:
    assert tiers_of(config({}, ttft_s_per_token=0.001)) == {"default": Slo()}


@pytest.mark.parametrize(
    ("asked", "name"), [(None, "default"), ("auto", "default"), ("default", "default"), ("batch", "batch")]
)
def test_a_request_names_its_tier_and_auto_is_the_default(asked: str | None, name: str) -> None:
    tiers = {"default": Slo(), "batch": Slo(itl_s=0.5)}
    assert tier_of(asked, tiers) == (name, tiers[name])


def test_a_tier_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(RequestError, match="auto, default, batch") as refused:
        tier_of("flex", {"default": Slo(), "batch": Slo()})
    assert refused.value.param == "service_tier"


@pytest.mark.parametrize(
    "slo",
    [
        {"auto": BATCH},
        {"Batch": BATCH},
        {"batch": {"ttft_s_per_token": 0.1}},
        {"batch": {"ttft_s": 0}},
        {"batch": {"itl_statistic": "p42"}},
        {"batch": {"itl_s": -1}},
    ],
)
def test_a_tier_that_means_nothing_is_refused_in_the_config(slo: object) -> None:
    with pytest.raises(ConfigError, match="gateway"):
        config(slo)
