"""What `pdmux tune` is to search, on what, and by what: made of its arguments, and checked before anything is simulated."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import Any

from pdmux_ray.config import EngineConfig
from pdmux_ray.costs.catalog import Costs, device_of
from pdmux_ray.costs.device import DeviceModel
from pdmux_ray.costs.gpu import SHAPES
from pdmux_ray.costs.profiled import profiled
from pdmux_ray.costs.sm_share import Assumptions, Concern, assumptions, concern, scaled
from pdmux_ray.device.cpu.cores import usable_cores
from pdmux_ray.errors import ConfigError
from pdmux_ray.latency.profile import read as read_profile
from pdmux_ray.metrics.goodput import Slo
from pdmux_ray.metrics.slo_text import SloText
from pdmux_ray.model.source import resolve
from pdmux_ray.report import figures
from pdmux_ray.sim.fleet import SPREAD
from pdmux_ray.tune.candidates import Candidate, Kind, Space
from pdmux_ray.tune.estimate import Work, work
from pdmux_ray.tune.search import FIRST, Variant
from pdmux_ray.tune.served import MAX_BATCH, Servers, base_settings
from pdmux_ray.tune.trial import Changes, Setting
from pdmux_ray.types import Mode
from pdmux_ray.workload.arrivals import Arrivals
from pdmux_ray.workload.outline import Outline, reusable_fraction
from pdmux_ray.workload.requests import Workload
from pdmux_ray.workload.scaling import Scaling
from pdmux_ray.workload.source import TokenWorkload, load_workload
from pdmux_ray.workload.traces import Trace

TPS = (1, 2, 4, 8)
MOST_GPUS = 256  # which are 33,000 topologies of TP 1
MODES = (Mode.AUTO, *(mode for mode in Mode if mode is not Mode.AUTO))
SECONDS = 60.0  # of arrivals of a run, about; more where one of the next two asks for it
# Fleets start empty, and decodes pile up for as long as an answer takes: a run has so many times that of the mean answer, or
# most of its requests come before the load that they are to stand for.
ANSWERS = 5
# A rate that is x % too high makes the last request of a run late by x % of the run: with so many times what a first token may
# take, those that are a twentieth too high begin to show.
DELAYS = 20
FEWEST, MOST = 300, 20_000  # requests of a run
SAMPLE = 1000  # requests whose lengths stand for the load's


@dataclass(frozen=True, slots=True)
class GpuDevices:
    """Groups of a published GPU: see `Setting.device`."""

    gpu: str
    shape: str
    costs: Costs
    assume: Assumptions

    def __call__(self, tp: int, changes: tuple[tuple[str, float], ...]) -> DeviceModel:
        assume = replace(self.assume, **dict(changes))
        return device_of(self.gpu, self.shape, tp=tp, costs=self.costs, page_size=EngineConfig().page_size, assume=assume)


@dataclass(frozen=True, slots=True)
class OneDevice:
    """That was profiled. Its link is all that is assumed of it."""

    device: DeviceModel

    def __call__(self, tp: int, changes: tuple[tuple[str, float], ...]) -> DeviceModel:
        return replace(self.device, link_bytes_per_s=self.device.link_bytes_per_s * dict(changes).get("link", 1.0))


@dataclass(frozen=True, slots=True)
class Plan:
    """What is searched, on what, by what; checked."""

    space: Space
    setting: Setting
    fresh: Setting
    servers: Servers
    workers: int  # processes
    works: dict[int, Work]
    assume: dict[str, float]  # what is assumed of devices, by name
    sensitivity: bool
    notes: Sequence[str]

    @classmethod
    def of(cls, args: argparse.Namespace) -> Plan:
        """Raises ConfigError."""
        slo = _slo(args.slo)
        workload, arrivals = _load(args)
        outlines = workload.outlines(_count_of(workload, SAMPLE), args.seed)
        setting, assume = _setting(args, workload, arrivals, slo)
        devices, left_out = _devices(setting, args, outlines)
        cached = reusable_fraction(outlines)
        lengths = [(each.prompt_tokens, each.output_tokens) for each in outlines]
        itl_s = slo.itl_s or 0.0
        works = {tp: work(device, lengths, cached, itl_s, MAX_BATCH) for tp, device in devices.items()}
        space = Space(args.gpus, sorted(devices), args.modes or MODES, [int(tokens) for tokens in args.thresholds])
        best_rps = max(works[topology.tp].most_rps(topology) for topology in space.topologies())
        setting = replace(setting, requests=_requests(args, workload, FIRST * best_rps, _seconds(slo, lengths)))
        fresh = _fresh(setting, workload)
        notes = [*_notes(setting, space, devices), _confirmed_on(setting, fresh), *left_out, *workload.description]
        notes += _too_short(setting.requests, FIRST * best_rps, _seconds(slo, lengths))
        servers, count = Servers(None if args.profile else SHAPES[args.model], _on_gpu(args)), args.workers or usable_cores()
        notes.append(f"{count} runs at once (--workers): what is tried, and when it is given up, depends on it.")
        return cls(space, setting, fresh, servers, count, works, assume, args.sensitivity, notes)

    def variants(self, candidates: Sequence[Candidate]) -> list[Variant]:
        """Each assumption that could matter to these, halved and doubled."""
        if not self.sensitivity:
            return []
        names = [name for name in self.assume if _matters(name, candidates)]
        found = [_variant(name, self.assume[name], factor) for name in names for factor in (0.5, 2.0)]
        for factor in (0.5, 2.0):
            found.append(Variant("spread", f"{self.setting.spread * factor:.3g}", Changes(spread=factor)))
            found.append(Variant("line", f"{self.setting.line_s * factor:.3g}", Changes(line=factor)))
        return found


def _matters(name: str, candidates: Sequence[Candidate]) -> bool:
    match concern(name):
        case Concern.GROUPS:
            return any(candidate.topology.tp > 1 for candidate in candidates)
        case Concern.TRANSFERS:
            return any(candidate.topology.prefill for candidate in candidates)
        case Concern.ALL:
            return True


def _variant(name: str, value: float, factor: float) -> Variant:
    changed = scaled(name, value, factor)
    return Variant(name, f"{changed:.3g}", Changes(assume=((name, changed),)))


def _slo(text: str) -> Slo:
    """Raises ConfigError."""
    parsed = SloText.parse(text)
    if parsed.needs_solo:
        raise ConfigError(
            "--slo: topologies differ in what an idle one takes, so multiples of it compare nothing. Give seconds."
        )
    if parsed.slo.itl_s is None or parsed.slo.ttft_s is None:
        raise ConfigError(
            "--slo needs both objectives, such as ttft=0.5,itl=50ms: without one of them no topology makes sense."
        )
    return parsed.slo


def _load(args: argparse.Namespace) -> tuple[TokenWorkload, Arrivals]:
    """Raises ConfigError."""
    scaling = Scaling(divide=args.scale_lengths, max_context=args.max_context)
    workload = load_workload(args.trace or args.workload, scaling=scaling, token_ids=args.token_ids)
    if not isinstance(workload, TokenWorkload):
        raise ConfigError("Texts cannot be simulated: without their model nobody knows its answers. Take lengths or a trace.")
    if args.trace and not isinstance(workload.source, Trace):
        raise ConfigError(f"--trace takes mooncake:FILE or azure:FILE, whose requests have times, not {args.trace!r}.")
    return workload, Arrivals.parse(args.arrivals or ("trace" if args.trace else "poisson"))


def _setting(
    args: argparse.Namespace, workload: TokenWorkload, arrivals: Arrivals, slo: Slo
) -> tuple[Setting, dict[str, float]]:
    """Without the number of requests; and what is assumed. Raises ConfigError."""
    devices: OneDevice | GpuDevices
    spread = SPREAD
    if args.profile:
        if args.assume or args.costs or args.tp not in (None, [1.0]):
            raise ConfigError("--tp, --costs and --assume go with --gpu: a profile has what its device was measured to do.")
        base, devices, context_length, spread = _of_profile(args, slo)
        assume = {"link": 1.0}
    else:
        if args.model not in SHAPES:
            raise ConfigError(f"--model: there is no shape {args.model!r}. Give one of {', '.join(SHAPES)}; or a --profile.")
        assumed = assumptions(args.assume)
        base, context_length = base_settings(args.checkpoint or SHAPES[args.model].hub, slo), SHAPES[args.model].context_length
        devices = GpuDevices(args.gpu, args.model, args.costs or "roofline", assumed)
        names = [field.name for field in fields(assumed)]
        if devices.costs == "silicon":  # sums over a group are measured
            names = [name for name in names if concern(name) is not Concern.GROUPS]
        assume = {name: getattr(assumed, name) for name in names}
    spread = spread if args.spread is None else args.spread
    common = (slo, args.attainment, base, devices, context_length, spread, args.line, args.drain, args.seed)
    return Setting(workload, arrivals, 0, 0, *common), assume


def _of_profile(args: argparse.Namespace, slo: Slo) -> tuple[dict[str, Any], OneDevice, int, float]:
    base = base_settings(args.model, slo)
    base["engine"] |= {"device": "auto", "kv_cache_gib": args.kv_cache_gib}
    base["engine"]["multiplex"]["profile"] = str(args.profile.absolute())
    engine = EngineConfig(kv_cache_gib=args.kv_cache_gib)
    found = profiled(args.profile, resolve(args.model, weights=False), engine, args.bandwidth)
    return base, OneDevice(found.device), found.context_length, found.spread


def _devices(
    setting: Setting, args: argparse.Namespace, outlines: Sequence[Outline]
) -> tuple[dict[int, DeviceModel], list[str]]:
    """By TP, those with room for the load; and what is said of the others. Raises ConfigError without any."""
    if args.gpus > MOST_GPUS:
        raise ConfigError(
            f"--gpus {args.gpus}: at most {MOST_GPUS}: n instances have about n² / 2 topologies. Tune for a part."
        )
    asked = [int(tp) for tp in args.tp or ()] or [tp for tp in TPS if args.gpus % tp == 0 and not (args.profile and tp > 1)]
    found, notes = dict[int, DeviceModel](), []
    for tp in asked:
        try:
            device = setting.device(tp, ())
        except ConfigError as error:
            notes.append(f"TP {tp} is left out: {error}")
            continue
        pool = device.layout.pages * device.layout.page_size
        fits = sum(each.prompt_tokens + each.output_tokens <= pool for each in outlines) / len(outlines)
        if fits >= args.attainment:
            found[tp] = device
        else:
            notes.append(
                f"TP {tp} is left out: its pool of {pool:,} tokens has room for {figures.percent(fits)} of the requests."
            )
    if not found:
        raise ConfigError(f"no TP of {', '.join(map(str, asked))} serves this load. " + " ".join(notes))
    return found, notes


def _count_of(workload: TokenWorkload, most: int) -> int:
    return min(most, len(workload.source.requests)) if isinstance(workload.source, Trace) else most


def _seconds(slo: Slo, lengths: Sequence[tuple[int, int]]) -> float:
    """Of arrivals, that a run needs before it shows what is carried for long. `lengths`: see `work`."""
    prompt, output = (fmean(each) for each in zip(*lengths, strict=True))
    first_s = slo.ttft_limit_s(round(prompt)) or 0.0
    return max(ANSWERS * (first_s + output * (slo.itl_s or 0.0)), DELAYS * first_s)


def _requests(args: argparse.Namespace, workload: TokenWorkload, rate: float, seconds: float) -> int:
    """Of a run; unless it is said, of a trace at most half, so that there are others to confirm on."""
    if args.requests:
        return int(args.requests)
    wanted = math.ceil(min(max(rate * max(SECONDS, seconds), FEWEST), MOST))
    return min(wanted, max(len(workload.source.requests) // 2, 1)) if isinstance(workload.source, Trace) else wanted


def _too_short(requests: int, rate: float, seconds: float) -> list[str]:
    """A warning, where a run is."""
    if requests >= rate * seconds:
        return []
    return [
        f"Runs are too short, of about {requests / rate:.3g} s at {rate:.3g} requests/s: with these objectives and lengths "
        f"they need {seconds:.3g} s, or goodput comes out too high. Give --requests {math.ceil(rate * seconds)} or more."
    ]


def _on_gpu(args: argparse.Namespace) -> bool:
    return args.profile is None or read_profile(args.profile).identity.device.startswith("NVIDIA")


def _fresh(setting: Setting, workload: TokenWorkload) -> Setting:
    """Other requests: of a trace those that follow, where there are as many."""
    fresh = replace(setting, seed=setting.seed + 1)
    if not isinstance(workload.source, Trace) or len(workload.source.requests) < 2 * setting.requests:
        return fresh
    return replace(fresh, skip=setting.requests)


def _confirmed_on(setting: Setting, fresh: Setting) -> str:
    if fresh.skip > setting.skip or not _is_trace(setting.workload):
        return "Confirmed on other requests than those that candidates were chosen by."
    return (
        "The trace has no two runs of requests: confirmed on the same ones at the same times, only step times are drawn anew."
    )


def _is_trace(workload: Workload) -> bool:
    return isinstance(workload, TokenWorkload) and isinstance(workload.source, Trace)


def _notes(setting: Setting, space: Space, devices: dict[int, DeviceModel]) -> list[str]:
    kinds = [topology.kind for topology in space.topologies()]
    counts = ", ".join(f"{kinds.count(kind)} {kind.value}" for kind in Kind)
    names = "; ".join(f"TP {tp}: {device.name}, KV of {_pool(device):,} tokens" for tp, device in devices.items())
    return [
        f"{space.gpus} GPUs, {counts} topologies; {names}",
        f"SLO: {figures.slo(setting.slo)}, of {figures.percent(setting.attainment)} of the requests",
        f"Each run: {setting.requests:,} requests of {setting.workload.name}, {setting.arrivals} arrivals",
    ]


def _pool(device: DeviceModel) -> int:
    return device.layout.pages * device.layout.page_size
