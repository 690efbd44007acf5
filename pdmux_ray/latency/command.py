"""`pdmux profile CONFIG --out FILE`: the command line. Light to import; what it needs is imported when it runs."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pdmux_ray.errors import ConfigError
from pdmux_ray.types import ONE_PASS_MODES, Mode

if TYPE_CHECKING:
    from pdmux_ray.config import EngineConfig
    from pdmux_ray.engine.runner import LaneRunner
    from pdmux_ray.latency.design import DesignLimits
    from pdmux_ray.latency.profile import Profile

TOO_DISTURBED = 0.1  # of the work: worth a word
GPU_NEW_TOKENS, GPU_CONTEXT_TOKENS = 8_192, 262_144  # of a prefill and of a decode batch: enough to see their slopes on a GPU


def add_profile(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measures how long steps take on this machine, and fits what policies predict with; docs/profiling.md."
    parser.add_argument("config", type=Path, metavar="CONFIG", help="the Serve config file of the instance")
    text = "another value for one of its keys, such as model=DIRECTORY; may be repeated; scripts/serve takes the same"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=text)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the profile; its curves go to FILE.html")
    parser.add_argument("--force", action="store_true", help="replace the profile that FILE has")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from pdmux_ray.config import load_serve_config
    from pdmux_ray.device.base import build_runner
    from pdmux_ray.engine.runner import LaneRunner
    from pdmux_ray.model.source import resolve

    if args.out.exists() and not args.force:
        raise ConfigError(f"{args.out} is there already; --force replaces it")
    _, config = load_serve_config(args.config, args.set)
    engine = config.engine
    if engine.device == "fake":
        raise ConfigError("device: fake has times that are settings: there is nothing to measure")
    if engine.mode in ONE_PASS_MODES:  # whose device needs no lanes
        engine = engine.model_copy(update={"mode": Mode.AUTO})
    model_dir = resolve(config.model, engine.reads_weights)
    runner = build_runner(model_dir, engine)
    try:
        if not isinstance(runner, LaneRunner):
            raise ConfigError(f"device: {engine.device} has no lanes to profile")
        profile = _profile(runner, engine, model_dir, args.out)
    finally:
        runner.close()
    _tell(profile, args.out)
    return 0


def _profile(runner: LaneRunner, engine: EngineConfig, model_dir: Path, out: Path) -> Profile:
    from rich.console import Console

    from pdmux_ray.clock import WallClock
    from pdmux_ray.latency.identity import Identified, identify
    from pdmux_ray.latency.others import others_s
    from pdmux_ray.latency.probe import probe
    from pdmux_ray.latency.run import Machine, Probing, run
    from pdmux_ray.report.progress import Progress

    if not isinstance(runner, Identified):
        raise ConfigError(f"device: {engine.device} does not say what it is: nothing to profile")
    identity = identify(model_dir, runner)
    with Progress(total=1.0, console=Console(stderr=True)) as progress:
        machine = Machine(
            probe=runner.probe if isinstance(runner, Probing) else partial(probe, dtype=identity.dtype),
            others_s=others_s,
            cores=len(os.sched_getaffinity(0)),
            clock=WallClock(),
            tell=lambda done, total, note: progress.update(done / total, note),
        )
        partial_path = out.with_name(out.name + ".partial")
        limits = _limits(runner, engine, model_dir, on_gpu=runner.device == "cuda")
        profile, kept = run(runner, limits, identity, partial_path, machine)
    kept.remove()  # a run that was not interrupted: to go on from it would give the same again
    profile.write(out)
    return profile


def _limits(runner: LaneRunner, engine: EngineConfig, model_dir: Path, on_gpu: bool) -> DesignLimits:
    from pdmux_ray.latency.design import DesignLimits
    from pdmux_ray.text.tokenizer import Tokenizer

    context = Tokenizer.load(model_dir).facts.context_length
    limits = DesignLimits(
        units=runner.units,
        splits=tuple(runner.splits),
        max_batch=engine.max_batch,
        context_length=min(context, engine.context_length or context),
        pool_tokens=runner.pages * runner.page_size,
        page_size=runner.page_size,
        chunk_tokens=engine.chunk_tokens,
    )
    return replace(limits, max_new_tokens=GPU_NEW_TOKENS, max_context_tokens=GPU_CONTEXT_TOKENS) if on_gpu else limits


def _tell(profile: Profile, out: Path) -> None:
    from pdmux_ray.latency.plots import write_page
    from pdmux_ray.latency.profile import table

    print(table(profile.qualities))
    if profile.disturbed > TOO_DISTURBED:
        print(
            f"\nOther programs used the cores during {profile.disturbed:.0%} of the work, also when it was measured again: "
            "the bounds are wider than they need be. Measure once more on an idle machine."
        )
    page = out.with_name(out.name + ".html")
    write_page(profile, page)
    print(f"\n{out}: {len(profile.points)} kinds of work in {profile.took_s:.0f} s; curves in {page}")
