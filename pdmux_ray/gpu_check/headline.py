"""What multiplexing is worth here: AUTO against chunked prefill on one engine, open loop, in the shape of CodeLlama-34B.

Every setting meets the same requests at the same moments, at rates that rise until it no longer keeps its objectives. They are
shares of what the device could carry if every step were as efficient as possible. There is time for runs of seconds only: so
figures come with their intervals, and a ratio whose interval reaches below the limit is said to be unsure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from pdmux_ray.device.cuda.runner import CudaRunner
from pdmux_ray.engine.engine import Engine
from pdmux_ray.engine.loop import Publish
from pdmux_ray.gpu_check.few_points import quick_costs
from pdmux_ray.gpu_check.lab import Lab
from pdmux_ray.gpu_check.open_loop import OpenLoop
from pdmux_ray.gpu_check.report import Limit, Row, Verdict
from pdmux_ray.gpu_check.settings import Multiplex, Settings
from pdmux_ray.latency.correction import CorrectedCosts
from pdmux_ray.metrics.goodput import Goodput, RatePoint, Slo, goodput
from pdmux_ray.metrics.summary import RunSummary, rate_point, summarize_run
from pdmux_ray.policy.views import Piece
from pdmux_ray.types import Mode
from pdmux_ray.workload.arrivals import plan, poisson
from pdmux_ray.workload.outline import reusable_fraction
from pdmux_ray.workload.scaling import Scaling
from pdmux_ray.workload.shapes import LOOGLE, SHAREGPT, Shape
from pdmux_ray.workload.source import TokenWorkload

ITL_S = 0.06
SLO = Slo(ttft_s=1.0, ttft_s_per_token=0.001, itl_s=ITL_S)  # the public MuxWise code's TTFT: 1 ms a prompt token, 1 s at least
ATTAINMENT = 0.9  # of requests
ITL_MS = Limit(1e3 * ITL_S)  # the p99 of all gaps, at every rate that AUTO was given
GAIN = Limit(2.0, at_least=True)  # goodput of AUTO by that of the best chunked size, on the long load
SHARES = {LOOGLE.name: (0.3, 0.5, 0.8), SHAREGPT.name: (0.4, 0.7)}  # rates, of what the device could carry at most
TIME_SHARES = {LOOGLE.name: 0.075, SHAREGPT.name: 0.028}  # of the time that is left, for one run
LEAST_RUN_S = 2.0
CHUNK_GRAIN = 64  # tokens by which the tuned chunk is chosen
_ASKS = 64  # requests whose lengths tell a load's mean
_RESERVE_S = 3.0  # for what comes after the last run


@dataclass
class Target:
    """One setting on one load. `done`: it has missed its objectives, so higher rates would tell nothing."""

    name: str
    settings: Settings
    points: list[RatePoint] = field(default_factory=list)
    done: bool = False

    @property
    def goodput(self) -> Goodput:
        return goodput(self.points, ATTAINMENT) if self.points else Goodput.unknown()


def headline(lab: Lab) -> Iterator[Row]:
    runner, settings = _open(lab)
    costs = quick_costs(lab, runner)
    yield Row("seconds left after opening the model and a quick profile", lab.left_s, "s")
    tuned = tuned_chunk(lab, runner, costs)
    yield Row(f"largest chunk whose bound keeps {1e3 * ITL_S:.0f} ms", float(tuned), "tokens")
    left_s = lab.left_s - _RESERVE_S
    for shape in (LOOGLE, SHAREGPT):
        targets = make_targets(lab, settings, tuned)
        load = Load(lab, runner, costs, shape, 0.2 if lab.dry else max(LEAST_RUN_S, TIME_SHARES[shape.name] * left_s))
        for target in targets:
            yield from load.offer(target)
        yield from compare(lab, load.name, load.rates[0], targets)


def make_targets(lab: Lab, settings: Settings, tuned: int) -> list[Target]:
    """AUTO first: should time run out, it is what must be known."""
    chunked = [
        Target(
            f"chunked {size}{' (tuned)' * (size == tuned)}",
            replace(settings, mode=Mode.CHUNKED, multiplex=Multiplex(), chunk_tokens=size),
        )
        for size in sorted({tuned, *lab.sizes.chunks})
    ]
    return [Target("auto", settings), *chunked]


class Load:
    """One shape of requests, and the runs that offer it."""

    def __init__(self, lab: Lab, runner: CudaRunner, costs: CorrectedCosts, shape: Shape, run_s: float) -> None:
        self._lab, self._runner, self._costs, self.run_s = lab, runner, costs, run_s
        model = lab.sizes.big
        scaling = Scaling(divide=lab.sizes.divide, max_context=model.context_length, min_output_tokens=2)  # one has no gap
        self.name, self._workload = shape.name, TokenWorkload(shape, scaling, (3, model.vocab_size))
        self.rates = [share * self._most_rps() for share in SHARES[shape.name]]

    def offer(self, target: Target) -> Iterator[Row]:
        """The rates, ascending, until the target no longer keeps its objectives or there is no time for another run."""
        for rate in self.rates:
            if target.done or (self._lab.left_s < self.run_s and not self._lab.dry):
                return
            if (summary := self._run(target, rate)) is None:
                return
            what, p99 = f"{self.name}, {target.name}, {rate:.2f}/s", summary.itl_s.p99
            note = f"good {summary.good_fraction:.0%} of {summary.requests}"
            if target.name == "auto":
                yield self._lab.row(ITL_MS, f"{what}: ITL p99", math.nan if p99 is None else 1e3 * p99, "ms", note)
            else:
                yield Row(f"{what}: ITL p99", "none" if p99 is None else 1e3 * p99, "ms", note=note)
            ttft_s = summary.ttft_s.p99
            yield Row(f"{what}: TTFT p99", "none" if ttft_s is None else ttft_s, "s")

    def _run(self, target: Target, rate: float) -> RunSummary | None:
        """None when it was so short that no request can be judged."""
        count = max(1, round(rate * self.run_s))
        asks = self._workload.asks(count, seed=0)
        model = self._lab.sizes.big
        limits = target.settings.limits(model.context_length, model.vocab_size)

        def make(publish: Publish) -> Engine:
            predicts = limits.has_lanes
            return Engine(self._runner, limits, publish, self._lab.clock, costs=self._costs if predicts else None)

        planned = plan(asks, poisson(count, rate, seed=0))
        offered = OpenLoop(make, self._lab.clock).run(planned, max(self.run_s, planned[0].due_s + 0.1), SLO)
        if not offered.lifelines:
            return None
        point = rate_point(rate, offered.lifelines, SLO)
        target.points.append(point)
        target.done = point.good_fraction < ATTAINMENT
        return summarize_run(target.name, rate, offered.lifelines, SLO)

    def _most_rps(self) -> float:
        """Requests a second at which prefills on every unit and decodes in full batches would take all of the time."""
        outlines, batch, units = self._workload.outlines(_ASKS, seed=0), self._lab.sizes.max_batch, self._runner.units
        prompt = fmean(outline.prompt_tokens for outline in outlines)
        prior = int(prompt * reusable_fraction(outlines))  # by a prefix cache without end
        new = max(1, int(prompt) - prior)
        prefill_s = self._costs.prefill((Piece(new, prior),), self._runner.layers, units, 0, last=True).predicted_s
        decode_s = self._costs.decode(batch, batch * int(prompt), units, 0).predicted_s
        return 1.0 / (prefill_s + fmean(outline.output_tokens for outline in outlines) * decode_s / batch)


def tuned_chunk(lab: Lab, runner: CudaRunner, costs: CorrectedCosts) -> int:
    """The best chunked can do by prediction: the longest chunk whose step, beside a few decodes amid long contexts, keeps the
    objective by its 99 % bound."""
    sizes, grain = lab.sizes, 4 if lab.dry else CHUNK_GRAIN
    batch, context = sizes.profile_batches[1], sizes.profile_contexts[-1]
    fitting = [
        tokens
        for tokens in range(grain, max(sizes.chunks) + 1, grain)
        if costs.mixed(batch, batch * context, (Piece(tokens, context),), runner.units).bound_s <= ITL_S
    ]
    return max(fitting, default=grain)


def compare(lab: Lab, name: str, lowest_rps: float, targets: Sequence[Target]) -> Iterator[Row]:
    """Goodput of each on the load of that name; then of AUTO, which is the first, by the best chunked. Of chunks that hold at
    no rate all that is known is that they carry less than the lowest one."""
    for target in targets:
        found = target.goodput
        low, high = found.ci
        yield Row(f"{name}, {target.name}: goodput", found.rps, "req/s", note=f"{found.bound.value}, {low:.2f} to {high:.2f}")
    auto, best = targets[0].goodput, max((target.goodput for target in targets[1:]), key=lambda found: found.rps)
    gain, least = auto.rps / (best.rps or lowest_rps), auto.ci[0] / (best.ci[1] or lowest_rps)
    note = f"at least {least:.2f} at 95 %: " + ("sure" if GAIN.holds(least) else "not sure, by runs this short")
    what = f"{name}: goodput of auto by the best chunked"
    if any(not target.points for target in targets):
        yield Row(what, "not all were measured", verdict=Verdict.NOT_JUDGED if lab.dry else Verdict.FAILED, note="no time left")
    elif name == LOOGLE.name:
        yield lab.row(GAIN, what, gain, "x", note)
    else:
        yield Row(what, gain, "x", note=note)


def _open(lab: Lab) -> tuple[CudaRunner, Settings]:
    sizes = lab.sizes
    multiplex = Multiplex(itl_s=ITL_S, ttft_s=SLO.ttft_s, ttft_s_per_token=SLO.ttft_s_per_token)
    settings = lab.settings(sizes.kv_gib[2], sizes.max_batch, 2 * max(sizes.chunks), multiplex)
    return lab.runner(sizes.big, settings), settings
