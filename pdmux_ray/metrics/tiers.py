"""SLO tiers: what requests are judged by while they are served. A request names its tier by OpenAI's `service_tier`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pdmux_ray.config import AppConfig
from pdmux_ray.errors import RequestError
from pdmux_ray.metrics.goodput import Slo

DEFAULT, AUTO = "default", "auto"  # AUTO is the default one, in OpenAI's words


class Tier(NamedTuple):
    """What a request is judged by."""

    name: str
    slo: Slo


NO_OBJECTIVES = Tier(DEFAULT, Slo())


def tiers_of(config: AppConfig) -> dict[str, Slo]:
    """Tier -> its objectives. The default one is always there: without `gateway.slo.default` its objectives are those that the
    engine schedules by."""
    given = {tier: Slo(**slo.model_dump()) for tier, slo in config.gateway.slo.items()}
    engine = config.engine.multiplex
    per_token_s = engine.ttft_s_per_token if engine.ttft_s is not None else 0.0
    return {DEFAULT: Slo(engine.ttft_s, engine.itl_s, per_token_s)} | given


def tier_of(asked: str | None, tiers: Mapping[str, Slo]) -> Tier:
    """Of a request's `service_tier`. Raises RequestError that lists them."""
    name = DEFAULT if asked is None or asked == AUTO else asked
    if name not in tiers:
        raise RequestError(f"There is no service tier {asked!r}; there are {AUTO}, {', '.join(tiers)}.", "service_tier")
    return Tier(name, tiers[name])
