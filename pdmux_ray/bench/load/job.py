"""What a command is to measure: load and goal, made of its arguments and checked before anything is sent."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from pdmux_ray.bench.load import targets
from pdmux_ray.bench.load.client import Target, body
from pdmux_ray.bench.load.generator import Options
from pdmux_ray.bench.load.generator import run as run_loop
from pdmux_ray.bench.load.offer import Offer, Terms
from pdmux_ray.bench.load.search import Bisection
from pdmux_ray.errors import ConfigError
from pdmux_ray.metrics.slo_text import SloText
from pdmux_ray.report import figures
from pdmux_ray.report.progress import Progress
from pdmux_ray.report.table import print_line
from pdmux_ray.workload.arrivals import Arrivals
from pdmux_ray.workload.requests import Ask
from pdmux_ray.workload.scaling import Scaling
from pdmux_ray.workload.source import load_workload

SAMPLE = 200  # asks whose lengths stand for the workload's


@dataclass(frozen=True, slots=True)
class Job:
    """Load and goal of a command, checked. `terms` lacks the SLO while that is in multiples of an idle server's latency."""

    offer: Offer
    options: Options
    levels: Sequence[float]  # rates or, in closed loop, requests at once
    closed: bool
    search: tuple[float, float, float] | None  # low, high, tolerance
    slo: SloText
    attainment: float
    devices: int
    token_ids: tuple[int, int]
    scaling: Scaling
    endpoint: str
    description: Sequence[str]  # of the workload, as its longest run has it
    sample: Sequence[Ask]

    @classmethod
    def of(cls, args: argparse.Namespace, kept: bool = True) -> Job:
        """`kept`: a run has all its prompts in memory. Raises ConfigError for what is wrong or missing; nothing has been sent
        then."""
        levels = args.rates or args.concurrency or []
        for flag, given in (
            ("--workload", args.workload),
            ("--slo", args.slo),
            ("--rates, --search or --concurrency", levels or args.search),
        ):
            if not given:
                raise ConfigError(
                    f"{flag} is missing. `pdmux bench run --help` explains it; docs/benchmarking.md has examples."
                )
        scaling = Scaling(divide=args.scale_lengths, max_context=args.max_context)
        workload = load_workload(args.workload, scaling=scaling, token_ids=args.token_ids)
        duration_s = None if args.requests else args.duration or 60.0
        if args.concurrency and not args.requests:
            raise ConfigError("--concurrency needs --requests: in a closed loop the server decides how many fit a time.")
        offer = Offer(workload, Arrivals.parse(args.arrivals), args.requests, duration_s, args.warmup, args.seed)
        search = (*args.search, args.tolerance) if args.search else None
        most = max((*levels, *(args.search or ())), key=offer.count)  # what the workload cannot give is told now
        sample = _sample(offer, most, bool(args.concurrency), kept)
        body(Target("", "", args.endpoint), sample[0])  # chat takes no token ids
        description = [*workload.description]
        if isinstance(sample[0].prompt, str):
            description.append(
                "Every run sends these texts again: a server with a prefix cache knows them from the second run on."
            )
        return cls(
            offer,
            Options(drain_s=args.drain),
            levels,
            bool(args.concurrency),
            search,
            SloText.parse(args.slo),
            args.attainment,
            args.devices,
            args.token_ids,
            scaling,
            args.endpoint,
            description,
            sample,
        )

    @property
    def most_runs(self) -> int:
        """Of one target and round."""
        return Bisection(*self.search).most_probes if self.search else len(self.levels)

    def conditions(self, target: Target) -> dict[str, str]:
        """What is asked of it, in words: `requests.jsonl` of equal ones can be compared."""
        return {"url": target.url, "model": target.model, "endpoint": target.endpoint, **self.load()}

    def load(self) -> dict[str, str]:
        """The part of `conditions` that is the same for every target."""
        offer = self.offer
        return {
            "workload": offer.workload.name,
            "load": "closed loop" if self.closed else f"open loop, {offer.arrivals} arrivals",
            "each run": f"{offer.requests} requests" if offer.requests else f"{offer.duration_s:g} s of arrivals",
            "warm-up": f"{offer.warmup} requests",
            "seed": str(offer.seed),
            "scaling": f"lengths divided by {self.scaling.divide:g}, context at most {self.scaling.max_context or 'any'}",
            "token ids": f"{self.token_ids[0]} to {self.token_ids[1]}",
            "drain": f"{self.options.drain_s:g} s",
        }

    def terms(self, target: Target, console: Console) -> tuple[Terms, list[str]]:
        """With the SLO in seconds, measured first if it must be; and notes about it."""
        solo, notes = None, []
        if self.slo.needs_solo:
            print_line(console, f"measuring {target.url} when idle")
            plan = targets.plan_solo(self.sample, self.token_ids, self.scaling.max_context)
            with Progress(1.0, console) as progress:
                solo = run_loop(targets.measure_solo(target, plan, progress.update))
            notes.append(f"The SLO is a multiple of what one request takes {solo} (measured at {target.url}).")
            print_line(console, str(solo))
        slo = self.slo.resolve(solo)
        print_line(console, f"SLO: {figures.slo(slo)}")
        return Terms(slo, self.attainment, self.devices), notes


def _sample(offer: Offer, most: float, closed: bool, kept: bool) -> list[Ask]:
    """The first asks of the longest run. Raises ConfigError for what the workload cannot give."""
    if closed:
        return offer.asks(offer.count(most), most, 0)[:SAMPLE]
    planned = offer.planned(most, 0) if kept else offer.coming(most, 0)
    return [planned[index].ask for index in range(min(SAMPLE, len(planned)))]


def connect(url: str, args: argparse.Namespace) -> Target:
    """A target that has answered one request. Raises TargetError, ConfigError."""
    base = targets.base_url(url)
    target = Target(base, run_loop(targets.choose_model(base, args.model, args.api_key)), args.endpoint, args.api_key)
    return run_loop(targets.checked(target))
