"""How a gateway chooses: gathers what `policy.routing.choose_route` looks at, and remembers what it has chosen.

Knows nothing of ray, of lines or of HTTP.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pdmux_ray.config import AppConfig, EngineConfig, RoutingConfig
from pdmux_ray.costs.faked import faked
from pdmux_ray.latency.loading import as_told, read_costs
from pdmux_ray.policy.admission import TtftObjective
from pdmux_ray.policy.decisions import RouteChoice, RouteReason
from pdmux_ray.policy.routing import FitnessLimits, RouteAsk, RouteLimits, choose_route
from pdmux_ray.policy.views import CostModel, InstanceCosts, InstanceView
from pdmux_ray.serve.prefixes import PrefixIndex
from pdmux_ray.serve.wire import Figures
from pdmux_ray.types import Mode

SILENCE_S = 5.0  # an instance that sends nothing for so long (heartbeats come every second) is not given requests
PREFIX_LIFETIME_S = 600.0  # for so long a prompt is thought to be in the cache of the instance that got it
ENOUGH_BYTES = 64 * 2**20  # moved between instances, to know how fast that is


@dataclass(frozen=True, slots=True)
class Device:
    """What an instance says of its device, as its router needs it."""

    layers: int
    units: int
    one_pass_tokens: float | None  # see `policy.views.InstanceCosts`
    kv_bytes_per_token: int

    @classmethod
    def of(cls, description: Mapping[str, Any]) -> Device:
        return cls(**{each.name: description[each.name] for each in fields(cls)})


@dataclass(frozen=True, slots=True)
class Candidate:
    """An instance that may be chosen."""

    view: InstanceView
    device: Device
    pages: int  # of its pool
    figures: Figures = field(default_factory=dict)  # the newest that it has told


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """What of an application's configuration its routers need."""

    routing: RoutingConfig
    engine: EngineConfig
    disaggregated: bool  # there is a topology
    instances: int = 1  # that there should be

    @classmethod
    def of(cls, config: AppConfig) -> RouterSettings:
        replicas = config.placement.replicas if config.placement.enabled else None
        instances = len(config.roles) if replicas is None else replicas.min
        return cls(config.gateway.routing, config.engine, config.topology is not None, instances)


class Router:
    """Owner: the gateway's event loop."""

    def __init__(
        self,
        settings: RouterSettings,
        *,
        model: CostModel | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        """`model`: instead of the one that the configuration names. Raises ConfigError for a profile that cannot be read."""
        engine = settings.engine
        self.instances = settings.instances
        self.limits = FitnessLimits(SILENCE_S, engine.stall_timeout_s)
        objectives = engine.multiplex
        self._ttft_objective = TtftObjective(
            math.inf if objectives.ttft_s is None else objectives.ttft_s, objectives.ttft_s_per_token
        )
        self._settings = settings
        self._predicts = settings.disaggregated and settings.routing.policy == "predict"
        self._model = model or model_of(engine)
        self._index = PrefixIndex(engine.page_size, PREFIX_LIFETIME_S)
        self._clock = clock
        self._rng = rng or random.Random()

    def choose(
        self, prompt: Sequence[int], candidates: Mapping[str, Candidate], bandwidth: float | None
    ) -> tuple[RouteChoice, int]:
        """The choice, and how many of the prompt's tokens are to be prefilled by whoever does that. `bandwidth`: as measured,
        bytes a second."""
        now = self._clock()
        pages = self._index.pages(prompt) if self._settings.engine.prefix_cache and len(candidates) > 1 else []
        cached = self._index.cached(pages, now)
        views = [candidate.view for candidate in candidates.values()]
        limits = self._route_limits(candidates.values(), bandwidth)
        choice = choose_route(RouteAsk(len(prompt), cached), views, limits, self._costs(candidates), self._rng)
        if choice.instance_id is None:
            return choice, 0
        prefills = choice.prefill[0] if choice.prefill else choice.instance_id
        for name in {choice.instance_id, prefills}:
            self._index.sent(name, pages, candidates[name].pages, now)
        return choice, len(prompt) - cached.get(prefills, 0)

    def left_s(self, choice: RouteChoice, prompt_tokens: int) -> float:
        """Until the first token of what was chosen for is due; infinite when it is late anyhow: it lets others pass."""
        return math.inf if choice.reason is RouteReason.LATE else self._ttft_objective.of(prompt_tokens)

    def keep_only(self, instance_ids: Collection[str]) -> None:
        """Forgets instances that are gone."""
        self._index.keep_only(instance_ids)

    def _route_limits(self, candidates: Iterable[Candidate], bandwidth: float | None) -> RouteLimits:
        routing, objectives = self._settings.routing, self._settings.engine.multiplex
        return RouteLimits(
            fitness=self.limits,
            policy=routing.policy if self._settings.disaggregated else "local",
            threshold_tokens=routing.threshold_tokens,
            ttft_s=self._ttft_objective.ttft_s,
            ttft_s_per_token=self._ttft_objective.ttft_s_per_token,
            itl_s=math.inf if objectives.itl_s is None else objectives.itl_s,
            page_size=self._settings.engine.page_size,
            kv_bytes_per_token=max((candidate.device.kv_bytes_per_token for candidate in candidates), default=0),
            bandwidth=bandwidth or routing.bandwidth,
        )

    def _costs(self, candidates: Mapping[str, Candidate]) -> dict[str, InstanceCosts]:
        if self._model is None or not self._predicts:
            return {}
        return {
            name: InstanceCosts(as_told(self._model, each.figures), device.layers, device.units, device.one_pass_tokens)
            for name, each, device in ((name, each, each.device) for name, each in candidates.items())
        }


def one_pass_tokens(engine: EngineConfig) -> float | None:
    """See `policy.views.InstanceCosts`."""
    return {Mode.PREFILL_FIRST: math.inf, Mode.CHUNKED: float(engine.chunk_tokens)}.get(engine.mode)


def bandwidth_of(figures: Iterable[Figures]) -> float | None:
    """Bytes a second of one write between two instances, by what all of them have counted; None: too little was moved."""
    moved, seconds = 0.0, 0.0
    for each in figures:
        moved += _number(each, "pdmux_kv_written_bytes_total")
        seconds += _number(each, "pdmux_kv_written_seconds_total")
    return moved / seconds if moved >= ENOUGH_BYTES and seconds > 0 else None


def _number(figures: Figures, name: str) -> float:
    value = figures.get(name, 0.0)
    return value if isinstance(value, float | int) else 0.0


def model_of(engine: EngineConfig) -> CostModel | None:
    """The latency model of any of the instances, which are alike: each of them checks that the profile is of its device."""
    if engine.device == "fake":
        return faked(engine.fake).costs
    profile = engine.multiplex.profile
    return read_costs(Path(profile).expanduser()) if profile else None
