"""What multiplexing is worth here: AUTO against chunked prefill on one engine, open loop, in the shape of CodeLlama-34B.

Every setting meets the same requests at the same moments, at rates that rise until it no longer keeps its objectives. They are
shares of what the device could carry if every step were as efficient as possible. Requests come for much longer than the
longest TTFT objective, for which contexts are shortened, and a run ends when everyone has a first token or is late with it:
else who must wait would seldom be a miss. Still, in a burst of b seconds with an objective of t up to 1 + t / 0.9 b of what
could be carried without end keeps a 90 % attainment; so the highest rate is one that nothing carries, and a ratio is one of
bursts. There is time for few runs: figures come with their intervals, and a ratio that they leave open is not judged.
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
from pdmux_ray.gpu_check.open_loop import Offered, OpenLoop
from pdmux_ray.gpu_check.report import Limit, Row, Verdict
from pdmux_ray.gpu_check.settings import Multiplex, Settings
from pdmux_ray.latency.correction import CorrectedCosts
from pdmux_ray.metrics.goodput import Bound, Goodput, RatePoint, Slo, goodput
from pdmux_ray.metrics.summary import rate_point, summarize_run
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
SHARES = {LOOGLE.name: (0.5, 0.9, 1.7), SHAREGPT.name: (0.6,)}  # rates, of what the device could carry at most
PATIENCE = 0.6  # the longest TTFT objective, by how long requests come
TIME_SHARES = {LOOGLE.name: 0.09, SHAREGPT.name: 0.04}  # of the time that is left, for the arrivals of one run
LEAST_RUN_S = 5.0
OPENING_S = 60.0  # to open the model and to measure it: with less time left nothing could be compared
CHUNK_GRAIN = 64  # tokens by which the tuned chunk is chosen
NEAR = 1.25  # sizes of chunks that differ by less than this are one to the runs here
_ROUNDS = 8  # until rate and count agree
_DRY_RUN_S = 0.2
_RESERVE_S = 3.0  # for what comes after the last run
_GAIN_OF = "{}: goodput of auto by the best chunked"


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
    if lab.left_s < OPENING_S and not lab.dry:
        yield Row(_GAIN_OF.format(LOOGLE.name), "not run", verdict=Verdict.NOT_JUDGED, note="no time left: give --total-s")
        return
    runner, settings = _open(lab)
    costs = quick_costs(lab, runner)
    yield Row("seconds left after opening the model and a quick profile", lab.left_s, "s")
    tuned = tuned_chunk(lab, runner, costs)
    yield Row(f"largest chunk whose bound keeps {1e3 * ITL_S:.0f} ms", float(tuned), "tokens")
    left_s = lab.left_s
    for shape in (LOOGLE, SHAREGPT):
        targets = make_targets(lab, settings, tuned)
        load = Load(lab, runner, costs, shape, max(LEAST_RUN_S, TIME_SHARES[shape.name] * left_s))
        yield Row(f"{load.name}: contexts are cut to", load.context, "tokens", note=f"requests come for {load.run_s:.1f} s")
        for target in targets:
            yield from load.offer(target)
        yield from compare(lab, load.name, load.rates[0], targets)


def make_targets(lab: Lab, settings: Settings, tuned: int) -> list[Target]:
    """AUTO first, then the tuned chunk, which stands for sizes near it: should time run out, they are what must be known."""
    sizes = [tuned, *(size for size in lab.sizes.chunks if not tuned / NEAR < size < tuned * NEAR)]
    chunked = [
        Target(
            f"chunked {size}{' (tuned)' * (size == tuned)}",
            replace(settings, mode=Mode.CHUNKED, multiplex=Multiplex(), chunk_tokens=size),
        )
        for size in sizes
    ]
    return [Target("auto", settings), *chunked]


class Load:
    """One shape of requests, and the runs that offer it."""

    def __init__(self, lab: Lab, runner: CudaRunner, costs: CorrectedCosts, shape: Shape, run_s: float) -> None:
        """`run_s`: how long requests come at least; longer where they would be too few, or not patient by far."""
        self._lab, self._runner, self._costs, self.name = lab, runner, costs, shape.name
        for self.context in lab.sizes.headline_contexts:
            scaling = Scaling(divide=lab.sizes.divide, max_context=self.context, min_output_tokens=2)  # one has no gap
            self._workload = TokenWorkload(shape, scaling, (3, lab.sizes.big.vocab_size))
            if (longest_s := self._longest_ttft_s()) <= PATIENCE * run_s:
                break
        self.run_s = _DRY_RUN_S if lab.dry else max(run_s, longest_s / PATIENCE)
        self.rates = [self._rate(share) for share in SHARES[shape.name]]

    def offer(self, target: Target) -> Iterator[Row]:
        """The rates, ascending, until the target no longer keeps its objectives or there is no time for another run."""
        for rate in self.rates:
            if target.done:
                return
            what = f"{self.name}, {target.name}, {rate:.2f}/s"
            offered = self._run(target, rate)
            if not offered.decided:
                yield Row(what, "cut off", note=f"no time left: {offered.open} of {self.count(rate)} could not be judged")
                return
            summary = summarize_run(target.name, rate, offered.lifelines, SLO)
            p99, note = summary.itl_s.p99, f"good {summary.good_fraction:.0%} of {summary.requests}"
            note += f"; ended by its misses, {offered.open} open" * offered.missed
            if target.name == "auto":
                yield self._lab.row(ITL_MS, f"{what}: ITL p99", math.nan if p99 is None else 1e3 * p99, "ms", note)
            else:
                yield Row(f"{what}: ITL p99", "none" if p99 is None else 1e3 * p99, "ms", note=note)
            ttft_s = summary.ttft_s.p99
            yield Row(f"{what}: TTFT p99", "none" if ttft_s is None else ttft_s, "s")

    def count(self, rate: float) -> int:
        """Requests of a run."""
        return max(self._lab.sizes.least_requests, round(rate * self.run_s))

    def _run(self, target: Target, rate: float) -> Offered:
        """A target that cannot keep its objectives at the lowest rate has no goodput, however many miss: the run ends then."""
        count, model = self.count(rate), self._lab.sizes.big
        asks = self._workload.asks(count, seed=0)
        limits = target.settings.limits(model.context_length, model.vocab_size)

        def make(publish: Publish) -> Engine:
            predicts = limits.has_lanes
            return Engine(self._runner, limits, publish, self._lab.clock, costs=self._costs if predicts else None)

        most_misses = math.inf if target.points else most_misses_of(count)
        seconds = math.inf if self._lab.dry else self._lab.left_s - _RESERVE_S
        offered = OpenLoop(make, self._lab.clock, SLO).run(plan(asks, poisson(count, rate, seed=0)), seconds, most_misses)
        if offered.decided:
            point = rate_point(rate, offered.lifelines, SLO)
            target.points.append(point)
            target.done = offered.missed or point.good_fraction < ATTAINMENT
        return offered

    def _longest_ttft_s(self) -> float:
        """The longest objective of any request."""
        outlines = self._workload.outlines(self._lab.sizes.least_requests, seed=0)
        return max(SLO.ttft_limit_s(outline.prompt_tokens) or 0.0 for outline in outlines)

    def _rate(self, share: float) -> float:
        """Requests a second: this share of what could be carried of just as many as such a run has, for the fewer they are, the
        less of their prompts is in the cache already."""
        rate = share * self._most_rps(self._lab.sizes.least_requests)
        for _ in range(_ROUNDS):
            rate = share * self._most_rps(self.count(rate))
        return rate

    def _most_rps(self, count: int) -> float:
        """Requests a second at which prefills on every unit and decodes in full batches would take all of the time."""
        outlines, batch, units = self._workload.outlines(count, seed=0), self._lab.sizes.max_batch, self._runner.units
        prompt = fmean(outline.prompt_tokens for outline in outlines)
        prior = int(prompt * reusable_fraction(outlines))  # by a prefix cache without end
        new = max(1, int(prompt) - prior)
        prefill_s = self._costs.prefill((Piece(new, prior),), self._runner.layers, units, 0, last=True).predicted_s
        decode_s = self._costs.decode(batch, batch * int(prompt), units, 0).predicted_s
        return 1.0 / (prefill_s + fmean(outline.output_tokens for outline in outlines) * decode_s / batch)


def most_misses_of(count: int) -> int:
    """Of so many requests, when their attainment is kept."""
    return math.floor(count * (1.0 - ATTAINMENT) + 1e-9)


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
        low, high = bounds(found, lowest_rps)
        yield Row(f"{name}, {target.name}: goodput", found.rps, "req/s", note=f"{found.bound.value}, {low:.2f} to {high:.2f}")
    what, judged = _GAIN_OF.format(name), name == LOOGLE.name
    if any(not target.points for target in targets):
        verdict = Verdict.NOT_JUDGED if judged else Verdict.FIGURE
        yield Row(what, "not all were measured", verdict=verdict, note="no time left: give --total-s")
        return
    auto, *chunked = (target.goodput for target in targets)
    gain = auto.rps / (max(found.rps for found in chunked) or lowest_rps)
    least, most = gain_between(auto, chunked, lowest_rps)
    sure = GAIN.holds(least) or not GAIN.holds(most)
    note = f"{least:.2f} to {most:.2f} at 95 %{'' if sure else ': these runs cannot tell'}"
    yield GAIN.row(what, gain, "x", judged=sure and not lab.dry, note=note) if judged else Row(what, gain, "x", note=note)


def gain_between(auto: Goodput, chunked: Sequence[Goodput], lowest_rps: float) -> tuple[float, float]:
    """What the ratio of AUTO's goodput and that of the best chunked may be, by their 95 % intervals."""
    low, high = bounds(auto, lowest_rps)
    best_low, best_high = (max(ends) for ends in zip(*(bounds(found, lowest_rps) for found in chunked), strict=True))
    return low / best_high, high / best_low if best_low else math.inf


def bounds(found: Goodput, lowest_rps: float) -> tuple[float, float]:
    """Between which a goodput lies at 95 %. Where a setting held at every rate nothing is known of higher ones, and where it
    held at none, nothing of lower ones."""
    low, high = found.ci
    return low, math.inf if found.bound is Bound.AT_LEAST else max(high, lowest_rps)


def _open(lab: Lab) -> tuple[CudaRunner, Settings]:
    sizes = lab.sizes
    multiplex = Multiplex(itl_s=ITL_S, ttft_s=SLO.ttft_s, ttft_s_per_token=SLO.ttft_s_per_token)
    settings = lab.settings(sizes.kv_gib[2], sizes.max_batch, 2 * max(sizes.chunks), multiplex)
    return lab.runner(sizes.big, settings), settings
