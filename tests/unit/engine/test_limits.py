"""From a configuration and a model's facts to what an engine may do."""

from __future__ import annotations

import pytest

from pdmux_ray.config import EngineConfig
from pdmux_ray.engine.limits import resolve_limits
from pdmux_ray.errors import ConfigError
from pdmux_ray.types import ModelFacts

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
