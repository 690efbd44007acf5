"""Which prefill instance a request goes to: the four rules of Mooncake's figure 5, on its conversation trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from pdmux_ray.bench.literature.fleets import CONTEXT, SEED, TOKEN_IDS, StepTimes, Tell, config
from pdmux_ray.bench.literature.rows import Comparison, Row
from pdmux_ray.costs.device import DeviceModel
from pdmux_ray.costs.gpu import A800, LLAMA_70B
from pdmux_ray.metrics.lifeline import Lifeline, quantile
from pdmux_ray.policy.decisions import RouteChoice
from pdmux_ray.report import figures
from pdmux_ray.serve.router import Candidate, Router, RouterSettings
from pdmux_ray.sim.fleet import RouterOf, simulate
from pdmux_ray.types import Role
from pdmux_ray.workload.arrivals import LazyPlan
from pdmux_ray.workload.requests import Planned
from pdmux_ray.workload.source import TokenWorkload, load_workload
from pdmux_ray.workload.traces import Trace

PREFILL, DECODE = 8, 8  # nodes of eight GPUs
LINK = 100e9  # bytes a second of a node: four times 200 Gbit/s
POOL_TOKENS = 3_000_000  # of a node: about a terabyte of memory
BLOCK = 512  # tokens: the trace's, and so a page


class RandomRouter(Router):
    """Draws the prefill instance; the decode instance as ever."""

    def __init__(self, settings: RouterSettings, *, rng: Random, **given: Any) -> None:
        super().__init__(settings, rng=rng, **given)
        self._draw = rng

    def choose(
        self, prompt: Sequence[int], candidates: Mapping[str, Candidate], bandwidth: float | None
    ) -> tuple[RouteChoice, int]:
        choice, tokens = super().choose(prompt, candidates, bandwidth)
        if not choice.prefill:
            return choice, tokens
        peers = sorted(name for name, each in candidates.items() if each.view.role is Role.PREFILL)
        return replace(choice, prefill=(self._draw.choice(peers),)), len(prompt)


def by_load(settings: RouterSettings, **given: Any) -> Router:
    """Knows nothing of prefix caches, so that the queue alone decides; the instances have theirs."""
    return Router(replace(settings, engine=settings.engine.model_copy(update={"prefix_cache": False})), **given)


@dataclass(frozen=True, slots=True)
class Rule:
    """One way to choose."""

    name: str
    published_s: float
    policy: str
    router: RouterOf


RULES = (
    Rule("random", 19.65, "remote", RandomRouter),
    Rule("by load", 5.27, "remote", by_load),
    Rule("by load and the instance's own cache", 3.58, "remote", Router),
    Rule("by predicted TTFT (published: the cache of all)", 3.07, "predict", Router),
)


def compare(trace: Path, requests: int | None, steps: StepTimes, tell: Tell) -> Comparison:
    """`requests`: of the trace the first ones; None: all. Raises ConfigError."""
    planned, node = _planned(trace, requests), device(steps)
    rate = len(planned) / (planned.due_s[-1] or 1.0)
    rows, means = [], []
    for rule in RULES:
        ttft_s = sorted(found for life in run(rule, node, planned) if (found := life.ttft_s) is not None)
        means.append(mean_s := fmean(ttft_s))
        said = f"{figures.significant(mean_s)} (p90 {figures.significant(quantile(ttft_s, 0.9))})"
        rows.append(Row(f"{rule.name}: mean TTFT", rule.published_s, mean_s, "s", ours_as=said))
        tell(f"{rule.name}: mean TTFT {figures.duration(mean_s)}, of {len(ttft_s)} of {len(planned)} requests")
    ordered = means == sorted(means, reverse=True)
    rows.append(Row("random over by load", 19.65 / 5.27, means[0] / means[1], "×"))
    return Comparison(
        "Routing policies on Mooncake's conversation trace",
        "Qin et al., Mooncake (FAST '25), figure 5: 16 nodes of eight A800, dummy Llama-3-70B, mean TTFT.",
        rows,
        [
            f"{PREFILL} nodes prefill, {DECODE} decode, TP 8; {len(planned):,} requests at the trace's own times "
            f"({figures.significant(rate)} a second), token for token; caches of {POOL_TOKENS:,} tokens a node, free to read; "
            f"{LINK / 1e9:g} GB/s between nodes. The decode instance is the one with the fewest requests.",
            str(steps),
        ],
        f"the order is {'the published one' if ordered else 'not the published one'}. How long queues get depends on how near "
        "the nodes are to their limit, and the source says neither its step times nor its rate. No KV goes from one prefill "
        "node's cache to another's here: in place of the cache of all stands this "
        "project's own rule, which predicts the TTFT of every pair of instances.",
    )


def run(rule: Rule, node: DeviceModel, planned: Planned) -> Sequence[Lifeline]:
    """What becomes of them."""
    app = config(
        {"mode": "prefill_first", "max_batch": 512, "page_size": BLOCK},
        topology={"prefill": PREFILL, "decode": DECODE},
        gateway={"routing": {"policy": rule.policy, "bandwidth": LINK}},
    )
    return simulate(app, node, planned, seed=SEED, context_length=CONTEXT * 2, learning=True, router=rule.router).lifelines


def device(steps: StepTimes) -> DeviceModel:
    """A node."""
    node = steps.device(A800, LLAMA_70B, BLOCK, tp=8)
    pool_bytes = POOL_TOKENS * LLAMA_70B.kv_bytes_per_token
    return replace(node, link_bytes_per_s=LINK, layout=node.layout.filling(pool_bytes))


def _planned(trace: Path, requests: int | None) -> LazyPlan:
    """At their own times. Raises ConfigError."""
    workload = load_workload(f"mooncake:{trace}", token_ids=TOKEN_IDS)
    assert isinstance(workload, TokenWorkload)
    assert isinstance(workload.source, Trace)
    asks = workload.lazily(len(workload.source.requests) if requests is None else requests, SEED)
    return LazyPlan(asks, [outline.trace_s or 0.0 for outline in asks.outlines])
