"""What keeps a fleet from carrying more: what each request that missed was short of, and how much of everything was used.
From a run's own figures; docs/tune.md has the rules. Pure.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from pdmux_ray.costs.device import DeviceModel
from pdmux_ray.engine.engine import Engine
from pdmux_ray.metrics.goodput import Slo, Verdict
from pdmux_ray.metrics.lifeline import Lifeline, quantile
from pdmux_ray.policy.decisions import RouteChoice

FULL = 0.9  # of a pool's tokens, or a link's time: whoever comes waits for pages, or for those before him
MOST = 0.99  # of the requests have ended: one long answer more says nothing of the fleet
LONG = 0.5  # of the time to the first token that is allowed: a transfer that is the reason


class Binds(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    KV_MEMORY = "KV memory"
    LINK = "link"


@dataclass(frozen=True, slots=True)
class Uses:
    """How much of what there is was used while requests were there, 0 to 1; of the fleet's instances the mean."""

    prefill: float  # time that those who prefill (of an aggregated fleet all) prefilled
    decode: float  # time that those who decode did
    kv: float  # tokens of answers under way in the pools of those who decode, at their most
    link: float  # time that KV took on the links of those who prefill or of those who fetch, whichever are fewer


@dataclass(frozen=True, slots=True)
class Ran:
    """What is looked at. Requests and routes: aligned, in order of arrival. Engines: by instance; those of `prefill` only
    prefill."""

    lifelines: Sequence[Lifeline]
    choices: Sequence[RouteChoice]
    engines: Mapping[str, Engine]
    prefill: frozenset[str]
    device: DeviceModel

    @property
    def span_s(self) -> float:
        """From the first arrival until all but a few had ended."""
        ended_s = sorted(life.ended_s for life in self.lifelines if life.ended_s == life.ended_s)  # not NaN
        last_s = quantile(ended_s, MOST) if ended_s else self.lifelines[-1].due_s
        return max(last_s - self.lifelines[0].due_s, 1e-9)


def uses(ran: Ran) -> Uses:
    decoders = [name for name in ran.engines if name not in ran.prefill]
    prefillers = sorted(ran.prefill) or decoders
    peaks = _peaks(ran)
    fetched = sum(ran.engines[name].counters.kv_received_tokens for name in decoders)
    transfer_s = fetched * ran.device.kv_bytes_per_token / ran.device.link_bytes_per_s
    return Uses(
        _share(_busy_s(ran.engines, prefillers, ("prefill", "mixed")), len(prefillers) * ran.span_s),
        _share(_busy_s(ran.engines, decoders, ("decode", "mixed")), len(decoders) * ran.span_s),
        sum(peaks.get(name, 0.0) for name in decoders) / len(decoders),
        _share(transfer_s, min(len(prefillers), len(decoders)) * ran.span_s),
    )


def causes(ran: Ran, slo: Slo, used: Uses) -> Counter[Binds]:
    """Of each request that missed. `used`: of the whole run, if this is a part of it."""
    short = _short_of_pages(ran)
    found = Counter[Binds]()
    for lifeline, choice in zip(ran.lifelines, ran.choices, strict=True):
        verdict = slo.verdict(lifeline)
        if verdict is not Verdict.GOOD:
            cause = _cause(lifeline, choice, verdict, slo, short, ran.device)
            waits = cause is Binds.PREFILL and choice.prefill and used.link >= FULL
            found[Binds.LINK if waits else cause] += 1
    return found


def _cause(
    lifeline: Lifeline, choice: RouteChoice, verdict: Verdict, slo: Slo, short: frozenset[str], device: DeviceModel
) -> Binds:
    if choice.instance_id in short:
        return Binds.KV_MEMORY
    if verdict is Verdict.ITL:
        return Binds.DECODE
    limit_s = slo.ttft_limit_s(lifeline.prompt_tokens)
    transfer_s = lifeline.prompt_tokens * device.kv_bytes_per_token / device.link_bytes_per_s
    if choice.prefill and limit_s is not None and transfer_s > LONG * limit_s:
        return Binds.LINK
    return Binds.PREFILL


def _short_of_pages(ran: Ran) -> frozenset[str]:
    """Instances whose pool was full of answers under way. (Pages that wait for KV are no sign: a queue of prompts fills any
    pool with them.)"""
    return frozenset(name for name, peak in _peaks(ran).items() if peak >= FULL)


def _peaks(ran: Ran) -> dict[str, float]:
    """The most tokens that each instance decoded with at once, of its pool's. Shared prefixes count for each who has them."""
    pool = ran.device.layout.pages * ran.device.layout.page_size
    changes = defaultdict[str, list[tuple[float, float]]](list)
    for lifeline, choice in zip(ran.lifelines, ran.choices, strict=True):
        if lifeline.ttft_s is not None and choice.instance_id is not None:
            tokens = lifeline.prompt_tokens + (lifeline.asked_tokens or 0) / 2
            until_s = lifeline.ended_s if lifeline.ended_s == lifeline.ended_s else math.inf  # NaN: not before the run's end
            changes[choice.instance_id] += [(lifeline.due_s + lifeline.ttft_s, tokens), (until_s, -tokens)]
    return {name: min(max(_levels(found)) / pool, 1.0) for name, found in changes.items()}


def _levels(changes: Iterable[tuple[float, float]]) -> Iterable[float]:
    return itertools.accumulate(change for _, change in sorted(changes))


def _busy_s(engines: Mapping[str, Engine], names: Sequence[str], kinds: Sequence[str]) -> float:
    return sum(engines[name].timeline.times.took[kind].sum for name in names for kind in kinds)


def _share(part: float, whole: float) -> float:
    return min(part / whole, 1.0)
