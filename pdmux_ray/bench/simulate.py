"""`pdmux simulate CONFIG`: what `pdmux bench` would tell of a server, on a virtual clock and a device that is not at hand.

The configuration's engine, modes, roles and routing are those that servers run. The device is a profile's, or a published
GPU's. It leaves what `pdmux bench` leaves, and a timeline (`timeline-RATE.json`) of each rate for https://ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from kv_transfer.layout import KVLayout
from pdmux_ray.bench.load import targets
from pdmux_ray.bench.load.job import Job
from pdmux_ray.bench.load.offer import Terms
from pdmux_ray.bench.load.outcome import measured, reserve
from pdmux_ray.bench.load.provenance import command_here
from pdmux_ray.bench.load.session import RunRecord, Session
from pdmux_ray.bench.simulated_runs import Setup, idle_latency, only_errors, runs, simulated
from pdmux_ray.config import AppConfig, load_serve_config
from pdmux_ray.costs.catalog import device_of
from pdmux_ray.costs.device import DeviceModel, Slower
from pdmux_ray.costs.gpu import GPUS, SHAPES
from pdmux_ray.costs.learned import read as read_lessons
from pdmux_ray.costs.profiled import Profiled, profiled
from pdmux_ray.costs.sm_share import assumptions
from pdmux_ray.device.cpu.cores import usable_cores
from pdmux_ray.errors import ConfigError
from pdmux_ray.latency.model import FittedCosts
from pdmux_ray.model.source import resolve
from pdmux_ray.report import figures
from pdmux_ray.report.progress import Progress
from pdmux_ray.report.table import print_line
from pdmux_ray.sim.fleet import SPREAD
from pdmux_ray.workload.requests import Ask, PlannedRequest
from pdmux_ray.workload.source import TokenWorkload, load_workload
from pdmux_ray.workload.traces import Trace

WHAT = (
    "Simulated: engine, policies, routing and transfers are those that servers run; clock, device, network and the lines to "
    "the gateway are not (docs/simulate.md)."
)
KINDS = ("decode", "prefill", "mixed")


def simulate(args: argparse.Namespace) -> int:
    """Returns the exit code: 0, 1 when no request completed, 130 after Ctrl-C."""
    with only_errors():
        return _simulate(args)


def _simulate(args: argparse.Namespace) -> int:
    console, config = Console(stderr=True), load_serve_config(args.config, args.set)[1]
    job = _job(args, config)
    setup = _setup(args, config, job)
    simulated(setup, [PlannedRequest(0, 0.0, Ask((1,), 1))])  # what no engine takes is told now
    terms, notes = _terms(setup, job)
    reserve(args.out, args.force)
    with measured() as outcome:
        session = Session(args.config.stem, args.out, terms, {**_conditions(args, setup), **job.load()})
        session.notes += [command_here(), WHAT, *_notes(setup), *job.description, *notes]
        outcome.sessions.append(session)
        pool = f"KV of {setup.device.layout.pages * setup.device.layout.page_size:,} tokens"
        print_line(console, f"{_fleet(config)} of {setup.device.name}, {pool}; SLO: {figures.slo(terms.slo)}")
        with Progress(float(sum(map(job.offer.count, job.levels))), console) as progress:
            for index, run in enumerate(runs(setup, job.levels, progress, usable_cores())):
                session.add(RunRecord(run.rate, run.lifelines))
                session.add_units([replace(sample, run=index) for sample in run.units])
                if run.behind:
                    session.note(told := f"At {figures.rate(run.rate)} requests/s {run.behind}")
                    print_line(console, told)
    return outcome.finish(args.out)


def _job(args: argparse.Namespace, config: AppConfig) -> Job:
    """Raises ConfigError."""
    if args.trace:
        _take_times(args)
    elif args.scale_rate:
        raise ConfigError("--scale-rate multiplies the rate of a --trace. Give --rates with --workload.")
    for flag, given in (("--workload or --trace", args.workload), ("--rates", args.rates), ("--slo", args.slo)):
        if not given:
            raise ConfigError(f"{flag} is missing. `pdmux simulate --help` explains it; docs/simulate.md has examples.")
    args.devices = len(config.roles) * (args.tp or 1)
    job = Job.of(args, kept=False)
    if any(isinstance(ask.prompt, str) for ask in job.sample):
        raise ConfigError("Texts cannot be simulated: without their model nobody knows its answers. Take lengths or a trace.")
    return job


def _take_times(args: argparse.Namespace) -> None:
    """`--trace T` is `--workload T --arrivals trace`, at the rate at which the requests came. Raises ConfigError."""
    workload = load_workload(args.trace, token_ids=args.token_ids)
    source = workload.source if isinstance(workload, TokenWorkload) else None
    if not isinstance(source, Trace):
        raise ConfigError(f"--trace takes mooncake:FILE or azure:FILE, whose requests have times, not {args.trace!r}.")
    if args.rates is None:
        requests = source.requests[: args.requests]
        length_s = requests[-1].trace_s or 0.0
        if not length_s:
            raise ConfigError(f"The {len(requests)} requests of {args.trace} came at once: take more of them.")
        args.rates = [factor * len(requests) / length_s for factor in args.scale_rate or [1.0]]
        args.requests = args.requests or (None if args.duration else len(requests))
    args.workload, args.arrivals = args.trace, "trace"


def _setup(args: argparse.Namespace, config: AppConfig, job: Job) -> Setup:
    """Raises ConfigError."""
    found = as_served(_device(args, config), args.slower, args.learned, args.spread)
    device = replace(found.device, link_bytes_per_s=args.bandwidth) if args.bandwidth else found.device
    return Setup(config, device, found.context_length, found.spread, args.line, job.offer, args.drain, args.out)


def as_served(found: Profiled, slower: str, learned: Sequence[Path] | None, spread: float | None) -> Profiled:
    """By the options that say how a server differs from its profile. Raises ConfigError."""
    if learned and spread is not None:
        raise ConfigError("--spread and --learned exclude each other: steps scatter as those of the timeline did.")
    if learned:
        if not isinstance(found.device.costs, FittedCosts):
            raise ConfigError("--learned corrects a profile, or --costs roofline: silicon has no such terms.")
        known = read_lessons(learned, found.device.costs)
        return replace(found, device=replace(found.device, slower=known, pace=known.pace, host=known.host), spread=0.0)
    found = replace(found, device=replace(found.device, slower=parse_slower(slower)))
    return found if spread is None else replace(found, spread=spread)


def _device(args: argparse.Namespace, config: AppConfig) -> Profiled:
    engine = config.engine
    if args.gpu:
        device = device_of(
            *(args.gpu, args.model_shape),
            tp=args.tp or 1,
            costs=args.costs or "roofline",
            page_size=engine.page_size,
            assume=assumptions(args.assume),
        )
        if device.layout.pages < 1:
            raise ConfigError(
                f"{device.name}: its memory has no room for a page of KV. Take a larger GPU, more (--tp) or another shape."
            )
        if engine.kv_cache_gib:
            device = replace(device, layout=_asked(device, engine.kv_cache_gib))
        return Profiled(device, SHAPES[args.model_shape].context_length, SPREAD)
    if args.tp or args.costs or args.assume:
        raise ConfigError("--tp, --costs and --assume go with --gpu: a profile has what its device was measured to do.")
    path = args.profile or engine.multiplex.profile
    if path is None:
        raise ConfigError(
            f"{args.config} names no profile, so nobody knows how long steps take. Give --profile FILE (`pdmux profile` writes "
            f"one), or --gpu {'|'.join(GPUS)} with --model-shape."
        )
    return profiled(Path(path), resolve(config.model, weights=False), engine, config.gateway.routing.bandwidth)


def _asked(device: DeviceModel, gib: float) -> KVLayout:
    """The pool of a config's size. Raises ConfigError where the weights leave no room for it."""
    asked = device.layout.filling(gib * 2**30)
    if not 1 <= asked.pages <= device.layout.pages:
        room_gib = device.layout.pages * device.kv_bytes_per_token * device.layout.page_size / 2**30
        raise ConfigError(
            f"engine.kv_cache_gib: {gib:g} is not from a page to the {room_gib:.4g} that {device.name} has room for."
        )
    return asked


def parse_slower(text: str) -> Slower:
    """A number, or KIND=X,…. Raises ConfigError."""
    try:
        parts = dict(part.split("=") for part in text.split(",")) if "=" in text else dict.fromkeys(KINDS, text)
        factors = {kind: float(value) for kind, value in parts.items()}
        if not all(0.01 <= factor <= 100 for factor in factors.values()):
            raise ValueError
        return Slower(**factors)
    except (ValueError, TypeError):
        raise ConfigError(
            f"--slower {text!r} is not understood: give a number from 0.01 to 100, or several like decode=1.2,prefill=1.3."
        ) from None


def _terms(setup: Setup, job: Job) -> tuple[Terms, list[str]]:
    """With the SLO in seconds, and notes about it. Raises ConfigError."""
    solo, notes = None, []
    if job.slo.needs_solo:
        solo = idle_latency(setup, targets.plan_solo(job.sample, job.token_ids, job.scaling.max_context))
        notes.append(f"The SLO is a multiple of what one request takes {solo} (simulated).")
    return Terms(job.slo.resolve(solo), job.attainment, job.devices), notes


def _conditions(args: argparse.Namespace, setup: Setup) -> dict[str, str]:
    """What is simulated, in words. `load.comparison` knows which of them may differ where runs are compared."""
    engine, device = setup.config.engine, setup.device
    return {
        "configuration": " ".join([args.config.name, *args.set]),
        "fleet": _fleet(setup.config),
        "mode": engine.mode.value,
        "routing": setup.config.gateway.routing.policy if setup.config.topology else "by load",
        "device": device.name,
        "limits": f"at most {engine.max_batch} requests at once, {engine.max_waiting} waiting",
        "KV pool": f"{device.layout.pages:,} pages of {device.layout.page_size} tokens",
        "steps": f"times their prediction: {device.slower}; spread {setup.spread:.3g}",
        "line": f"{setup.line_s * 1e3:g} ms a message",
        "link": f"{device.link_bytes_per_s / 1e9:g} GB/s between two instances",
        **({"assumed": ", ".join(args.assume)} if args.assume else {}),
    }


def _fleet(config: AppConfig) -> str:
    """2 prefill, 1 mux."""
    roles = [role.value for role in config.roles]
    return ", ".join(f"{roles.count(role)} {role}" for role in dict.fromkeys(roles))


def _notes(setup: Setup) -> list[str]:
    gateways = setup.config.gateways
    if gateways == 1:
        return []
    return [f"One gateway is simulated, the configuration has {gateways}: each knows less of what the others have sent."]
