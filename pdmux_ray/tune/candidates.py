"""What may be chosen: how many instances have which role, how prefill and decode share one, who prefills. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pdmux_ray.errors import ConfigError
from pdmux_ray.types import Mode, RoutePolicy


class Kind(Enum):
    """Of a topology."""

    AGGREGATED = "aggregated"  # every instance does all of a request
    DISAGGREGATED = "disaggregated"  # xPyD: each instance does one phase
    MIXED = "mixed"  # some prefill; of the others all or some prefill, too


@dataclass(frozen=True, slots=True)
class Topology:
    """`tp`: GPUs of each instance. The others: instances in each role."""

    tp: int
    prefill: int
    mux: int
    decode: int

    @property
    def kind(self) -> Kind:
        if not self.prefill:
            return Kind.AGGREGATED
        return Kind.MIXED if self.mux else Kind.DISAGGREGATED

    @property
    def instances(self) -> int:
        return self.prefill + self.mux + self.decode

    @property
    def prefill_share(self) -> float:
        """Of the GPUs, those that only prefill."""
        return self.prefill / self.instances

    def __str__(self) -> str:
        """2P+6M: 2 that prefill, 6 that do both; D: decode."""
        counts = ((self.prefill, "P"), (self.mux, "M"), (self.decode, "D"))
        return "+".join(f"{count}{role}" for count, role in counts if count)


@dataclass(frozen=True, slots=True)
class Route:
    """See `config.RoutingConfig`. Of an aggregated topology: `LOCAL`."""

    policy: RoutePolicy
    threshold_tokens: int | None = None  # policy threshold

    def __str__(self) -> str:
        return self.policy if self.threshold_tokens is None else f"threshold {self.threshold_tokens}"


LOCAL, PREDICT, REMOTE = Route("local"), Route("predict"), Route("remote")


@dataclass(frozen=True, slots=True)
class Candidate:
    topology: Topology
    mode: Mode
    route: Route

    def __str__(self) -> str:
        parts = [str(self.topology), f"TP {self.topology.tp}"]
        parts += [self.mode.value] if self.topology.mux else []
        return ", ".join([*parts, *([str(self.route)] if self.topology.prefill else [])])

    def settings(self) -> dict[str, Any]:
        """The keys of a configuration (`AppConfig`) that make it this one."""
        engine, topology = {"mode": self.mode.value}, self.topology
        if topology.kind is Kind.AGGREGATED:
            return {"instances": topology.instances, "engine": engine}
        roles = {"prefill": topology.prefill, "mux": topology.mux, "decode": topology.decode}
        routing: dict[str, Any] = {"policy": self.route.policy}
        if self.route.threshold_tokens is not None:
            routing["threshold_tokens"] = self.route.threshold_tokens
        return {
            "topology": {role: count for role, count in roles.items() if count},
            "engine": engine,
            "gateway": {"routing": routing},
        }


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Groups of settings are merged, other values of `over` count."""
    found = dict(base)
    for key, value in over.items():
        before = found.get(key)
        found[key] = merged(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return found


def configured(base: Mapping[str, Any], candidate: Candidate, bandwidth: float) -> dict[str, Any]:
    """All settings of a candidate's configuration. `bandwidth`: between two instances, bytes a second."""
    return merged(merged(base, candidate.settings()), {"gateway": {"routing": {"bandwidth": bandwidth}}})


@dataclass(frozen=True, slots=True)
class Space:
    """What is searched. `gpus`: all of them are used. Raises ConfigError."""

    gpus: int
    tps: Sequence[int]
    modes: Sequence[Mode]  # the first one is tried wherever only one is
    thresholds: Sequence[int]  # tokens, of routes by threshold

    def __post_init__(self) -> None:
        if wrong := [tp for tp in self.tps if self.gpus % tp]:
            raise ConfigError(f"--tp {wrong[0]}: {self.gpus} GPUs are no whole number of instances of {wrong[0]} GPUs each.")

    def topologies(self) -> Iterator[Topology]:
        for tp in self.tps:
            count = self.gpus // tp
            yield Topology(tp, 0, count, 0)
            for prefill in range(1, count):
                for mux in range(count - prefill, -1, -1):
                    yield Topology(tp, prefill, mux, count - prefill - mux)

    def first(self) -> list[Candidate]:
        """Each topology once, aggregated ones in every mode: to decide which topologies are worth more."""
        return [
            Candidate(topology, mode, PREDICT if topology.prefill else LOCAL)
            for topology in self.topologies()
            for mode in (self.modes if topology.kind is Kind.AGGREGATED else self.modes[:1])
        ]

    def variants(self, topology: Topology) -> list[Candidate]:
        """Of one topology, what `first` has not: every other mode, and every other route."""
        if topology.kind is Kind.AGGREGATED:
            return []
        if topology.kind is Kind.DISAGGREGATED:  # nobody does both, so that no mode matters
            return [Candidate(topology, self.modes[0], REMOTE)]
        modes = [Candidate(topology, mode, PREDICT) for mode in self.modes[1:]]
        return [*modes, *(Candidate(topology, self.modes[0], Route("threshold", tokens)) for tokens in self.thresholds)]
