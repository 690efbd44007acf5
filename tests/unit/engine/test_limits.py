"""From a configuration and a model's facts to what an engine may do."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdmux_ray.clock import VirtualClock
from pdmux_ray.config import EngineConfig
from pdmux_ray.engine.engine import Engine
from pdmux_ray.engine.fake_runner import FakeRunner
from pdmux_ray.engine.limits import resolve_limits
from pdmux_ray.engine.planner import lane_limits
from pdmux_ray.errors import ConfigError
from pdmux_ray.policy.lane_limits import FixedRule
from pdmux_ray.types import Mode, ModelFacts, Split

from .world import limits

FACTS = ModelFacts(context_length=2048, vocab_size=100, eos_token_ids=frozenset({2}))


def test_the_model_states_what_the_configuration_leaves_open() -> None:
    limits = resolve_limits(EngineConfig(), FACTS)
    assert (limits.context_length, limits.vocab_size, limits.eos_token_ids) == (2048, 100, {2})
    assert resolve_limits(EngineConfig(context_length=512), FACTS).context_length == 512


def test_more_context_than_the_model_has_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"4096.*2048"):
        resolve_limits(EngineConfig(context_length=4096), FACTS)


@pytest.mark.parametrize(("asked", "shareable", "cached"), [(True, True, True), (True, False, False), (False, True, False)])
def test_prefixes_are_cached_only_where_equal_tokens_mean_equal_kv(asked: bool, shareable: bool, cached: bool) -> None:
    facts = ModelFacts(2048, 100, frozenset({2}), prefixes_are_shareable=shareable)
    assert resolve_limits(EngineConfig(prefix_cache=asked), facts).prefix_cache is cached


def device(units: int) -> FakeRunner:
    return FakeRunner(64, 4, 0.01, 0.0, VirtualClock(), units=units)


def config(**values: object) -> EngineConfig:
    return EngineConfig.model_validate({"device": "fake", **values})


@pytest.mark.parametrize(
    ("values", "units", "says"),
    [
        ({"mode": "split", "multiplex": {"itl_s": 0.1}}, 1, "two units.*has 1: raise engine.threads.*use auto, time_shared"),
        ({"mode": "split"}, 2, "itl_s is missing.*Set it.*or use policy fixed"),
        (
            {"mode": "split", "multiplex": {"itl_s": 0.1, "block_layers": 2}},
            2,
            "block_layers goes with policy fixed.*Leave it out",
        ),
        ({"mode": "auto", "multiplex": {"policy": "fixed"}}, 2, "auto compares predicted times.*Use policy slo, or mode split"),
        (
            {"mode": "split", "multiplex": {"policy": "fixed", "decode_units": 4}},
            4,
            "decode_units is 4.*can give decode 1, 2, 3",
        ),
        (
            {"mode": "capped", "multiplex": {"itl_s": 0.1, "admission": "refuse"}},
            2,
            "ttft_s is missing.*or use admission queue",
        ),
        ({"mode": "chunked", "multiplex": {"admission": "refuse"}}, 2, "refuse predicts, which mode chunked does not"),
    ],
)
def test_what_a_mode_lacks_is_said_with_what_to_do(values: dict[str, object], units: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve_limits(config(**values), FACTS, device(units))


def test_a_mode_with_lanes_needs_a_device_with_lanes() -> None:
    with pytest.raises(ConfigError, match=r"needs a device with lanes.*Use prefill_first or chunked"):
        resolve_limits(config(mode="split"), FACTS)


def test_time_shared_needs_one_unit_only() -> None:
    multiplex = {"policy": "fixed"}
    assert resolve_limits(config(mode="time_shared", multiplex=multiplex), FACTS, device(1)).mode is Mode.TIME_SHARED


class Unpredictable(FakeRunner):
    """Nobody knows what it takes."""

    costs = None  # type: ignore[assignment]

    def __setattr__(self, name: str, value: object) -> None:
        if name != "costs":
            super().__setattr__(name, value)


@pytest.mark.parametrize(
    ("multiplex", "says"),
    [
        ({"itl_s": 0.1}, "profile is missing: policy slo predicts.*pdmux profile"),
        ({"policy": "fixed", "admission": "refuse", "ttft_s": 1.0}, "profile is missing: admission refuse predicts"),
    ],
)
def test_who_predicts_needs_a_profile(multiplex: dict[str, object], says: str) -> None:
    runner = Unpredictable(64, 4, 0.01, 0.0, VirtualClock())
    bounds = resolve_limits(config(mode="split", multiplex=multiplex), FACTS, runner)
    with pytest.raises(ConfigError, match=says):
        Engine(runner, bounds, lambda sink, events: None)


@pytest.mark.parametrize(
    ("mode", "decode_units", "split"),
    [
        (Mode.SPLIT, None, Split(4, 4)),
        (Mode.SPLIT, 2, Split(6, 2)),
        (Mode.CAPPED, 2, Split(6, 8)),
        (Mode.TIME_SHARED, None, Split(8, 8)),
    ],
)
def test_the_fixed_policy_gives_decode_half_of_the_units_or_as_many_as_it_is_told(
    mode: Mode, decode_units: int | None, split: Split
) -> None:
    multiplex = config(multiplex={"policy": "fixed", "decode_units": decode_units}).multiplex
    assert lane_limits(limits(mode=mode, multiplex=multiplex), device(8)).rule == FixedRule(split)


H200 = Path(__file__).parents[3] / "configs" / "tables" / "sglang-h200.yaml"


def divided(decodes: tuple[int, ...]) -> FakeRunner:
    """A device of 132 units that was divided at its start."""
    found = device(132)
    found.splits = [Split(132 - units, units) for units in decodes]
    return found


def test_the_published_table_runs_on_a_gpu_that_was_divided_for_it() -> None:
    rules = limits(mode=Mode.SPLIT, multiplex=config(multiplex={"policy": "sglang", "table": str(H200)}).multiplex)
    rule = lane_limits(rules, divided((20, 28, 36, 52, 68, 76))).rule
    assert rule is not None
    assert rule.choose(12, 1024, 32)[0] == Split(96, 36)


def test_a_gpu_that_was_divided_otherwise_is_told_what_the_published_table_asks_for() -> None:
    rules = limits(mode=Mode.SPLIT, multiplex=config(multiplex={"policy": "sglang"}).multiplex)
    with pytest.raises(ConfigError, match=r"engine.cuda.splits: \[\[112, 20\], \[96, 36\], \[80, 52\]\]"):
        lane_limits(rules, divided((16, 32, 48, 64)))
