"""`pdmux bench`, `pdmux timeline`, `pdmux simulate` and `pdmux tune`: the command line. Light to import; what a command needs
is imported when it runs.

pdmux bench URL --workload sharegpt --rates 1,2,4 --slo ttft=0.5,itl=50ms --out DIR
pdmux bench compare A B … --workload … --out DIR       A, B: name=URL, or name=DIR of a finished run
pdmux bench report DIR
pdmux timeline URL --out FILE --picture FILE
pdmux simulate CONFIG --workload sharegpt --rates 1,2,4 --slo ttft=0.5,itl=50ms --out DIR
pdmux tune --trace T --model llama-8b --gpu H200 --gpus 8 --slo ttft=0.5,itl=50ms --out DIR
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from pdmux_ray.errors import ConfigError
from pdmux_ray.metrics.slo_text import HELP as SLO_HELP
from pdmux_ray.types import Mode

API_KEY_VARIABLE = "PDMUX_BENCH_API_KEY"
ACTIONS = ("run", "compare", "report")

TOKEN_IDS = (1000, 40000)  # ordinary words of most vocabularies
GPUS = ("H200", "H100", "B200", "A100", "A800")  # of costs/gpu.py
SHAPES = ("llama-8b", "llama-70b", "codellama-34b", "qwen3-32b", "opt-13b", "opt-66b", "opt-175b")
MOST = 1e15  # of any number, and its inverse the least above 0: beyond lie infinities

Number = TypeVar("Number", int, float)


def with_action(argv: Sequence[str]) -> list[str]:
    """`pdmux bench URL` is short for `pdmux bench run URL`."""
    short = argv[:1] == ["bench"] and len(argv) > 1 and argv[1] not in (*ACTIONS, "-h", "--help")
    return ["bench", "run", *argv[1:]] if short else list(argv)


def add_bench(parser: argparse.ArgumentParser) -> None:
    parser.description = "Offers load to OpenAI-compatible servers and tells their latencies and goodput; docs/benchmarking.md."
    actions = parser.add_subparsers(required=True, metavar="URL | compare | report")
    run = actions.add_parser("run", help="`run URL`, or just URL: one server", usage="pdmux bench URL --workload W … --out DIR")
    run.add_argument("url", metavar="URL", help="of the server, such as http://127.0.0.1:8000")
    add_load(run)
    run.set_defaults(run=_run)
    compare = actions.add_parser("compare", help="several servers, or finished runs, under the same load")
    compare.add_argument(
        "targets", nargs="+", metavar="NAME=TARGET", help="a URL, or the directory of a finished run; the first is the baseline"
    )
    compare.add_argument(
        "--rounds",
        type=_count,
        default=1,
        metavar="N",
        help="times that each rate is offered to each server, in alternating order; default 1",
    )
    add_load(compare)
    compare.set_defaults(run=_compare)
    report = actions.add_parser("report", help="build report.html again from the files")
    report.add_argument("directory", type=Path, metavar="DIR")
    report.set_defaults(run=_report)


def add_timeline(parser: argparse.ArgumentParser) -> None:
    parser.description = "Writes what the step loops of a server of pdmux-ray did lately as a trace, as a picture, or both."
    parser.add_argument("url", metavar="URL", help="of the server, such as http://127.0.0.1:8000")
    parser.add_argument("--out", type=Path, metavar="FILE", help="a trace (JSON) for https://ui.perfetto.dev")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="a page (HTML): units per lane under the arrivals")
    parser.add_argument("--seconds", type=_positive, default=60.0, metavar="S", help="how far back; default 60")
    parser.add_argument("--instance", metavar="ID", help="one of the server's instances; default: all")
    _add_api_key(parser)
    parser.set_defaults(run=_timeline)


def add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Tells latencies and goodput of a configuration on a virtual clock, on a device that was profiled or that others have "
        "measured; docs/simulate.md."
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a Serve config file, as scripts/serve takes it")
    text = "another value for one of its keys, such as engine.mode=chunked; may be repeated"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=text)
    _add_out(parser)
    load, workload = parser.add_argument_group("load"), parser.add_argument_group("workload")
    levels, source = load.add_mutually_exclusive_group(), workload.add_mutually_exclusive_group()
    _add_rates(levels)
    text = "with --trace, instead of rates: so many times as often as its requests came; default 1"
    levels.add_argument("--scale-rate", type=_list_of(_positive), metavar="F,F,…", help=text)
    _add_amount(load)
    _add_source(source)
    source.add_argument(
        "--trace", metavar="T", help="mooncake:FILE or azure:FILE, whose requests come at the trace's own times"
    )
    _add_lengths(workload)
    _add_goal(parser.add_argument_group("goal"))
    _add_simulated(parser.add_argument_group("device"))
    parser.set_defaults(run=_simulate, concurrency=None, search=None, endpoint="completions")


def _add_simulated(group: argparse._ArgumentGroup) -> None:
    device = group.add_mutually_exclusive_group()
    text = "what `pdmux profile` wrote; default: engine.multiplex.profile of CONFIG"
    device.add_argument("--profile", type=Path, metavar="FILE", help=text)
    device.add_argument("--gpu", choices=GPUS, help="one that was measured by others, instead of a profile")
    text = "with --gpu; default llama-8b"
    group.add_argument("--model-shape", choices=SHAPES, default="llama-8b", help=text)
    add_costs(group)
    add_server(group)
    text = "bytes a second between two instances; default: the GPU's, with a profile gateway.routing.bandwidth of CONFIG"
    group.add_argument("--bandwidth", type=_positive, metavar="B", help=text)


def add_costs(group: argparse._ActionsContainer) -> None:
    """What `--gpu` leaves open."""
    group.add_argument("--tp", type=_count, metavar="N", help="with --gpu: GPUs of an instance (tensor parallel); default 1")
    add_assumed(group)


def add_assumed(group: argparse._ActionsContainer) -> None:
    text = "with --gpu: step times from published rates, or from a database of measured ones (silicon); default roofline"
    group.add_argument("--costs", choices=("roofline", "silicon"), help=text)
    text = "with --gpu: another value of what docs/simulate.md says is assumed, such as decode_beside=0.5; may be repeated"
    group.add_argument("--assume", action="append", default=[], metavar="KEY=VALUE", help=text)


def add_server(group: argparse._ActionsContainer) -> None:
    """How a server differs from what its profile says."""
    slower = group.add_mutually_exclusive_group()
    text = "how many times as long steps take as predicted: a number, or decode=X,prefill=X,mixed=X; default 1"
    slower.add_argument("--slower", default="1", metavar="X", help=text)
    text = "timelines of servers (`pdmux timeline URL --out FILE`): how much longer steps took, when, and what the host took"
    slower.add_argument("--learned", type=Path, nargs="+", metavar="FILE", help=text)
    text = "of step times about their prediction, as the deviation of their log; default: what timeline or profile found, "
    group.add_argument("--spread", type=_share, metavar="X", help=text + "on a GPU 0.03")
    text = "seconds that a message between gateway and instance takes; default 0.0005"
    group.add_argument("--line", type=_share, default=0.0005, metavar="S", help=text)


def add_tune(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Finds the topology (all instances alike, xPyD, or a mix), TP, mode and route with the most goodput per GPU for a "
        "load, by simulation; docs/tune.md."
    )
    parser.add_argument("--gpus", type=_count, required=True, metavar="N", help="of the whole fleet; all of them are used")
    text = f"with --gpu one of {', '.join(SHAPES)}; with --profile a directory or hub id"
    parser.add_argument("--model", required=True, metavar="M", help=text)
    parser.add_argument("--out", type=Path, default=Path("tuned"), metavar="DIR", help="for what it leaves; default tuned")
    parser.add_argument("--force", action="store_true", help="replace the results that DIR has")
    load = parser.add_argument_group("load")
    source = load.add_mutually_exclusive_group(required=True)
    text = "mooncake:FILE or azure:FILE: its requests, their times stretched to each rate"
    source.add_argument("--trace", metavar="T", help=text)
    _add_source(source)
    text = "of a run, of which the first tenth does not count; default: about a minute of arrivals, at least 300"
    load.add_argument("--requests", type=_count, metavar="N", help=text)
    load.add_argument("--arrivals", metavar="A", help="poisson, gamma:K or trace; default trace with --trace, else poisson")
    text = "simulated seconds to wait for answers after the last arrival; what is not done then is a miss; default 60"
    load.add_argument("--drain", type=_positive, default=60.0, metavar="S", help=text)
    load.add_argument("--seed", type=_natural, default=0, metavar="N", help="default 0")
    _add_lengths(load)
    goal = parser.add_argument_group("goal")
    goal.add_argument("--slo", required=True, metavar="SLO", help="such as ttft=0.5,itl=50ms; in seconds, both of them")
    goal.add_argument(
        "--attainment", type=_fraction, default=0.9, metavar="X", help="share of requests that must be good; default 0.9"
    )
    _add_search(parser.add_argument_group("search"))
    _add_tuned_device(parser.add_argument_group("device"))
    parser.set_defaults(run=_tune)


def _add_search(group: argparse._ArgumentGroup) -> None:
    text = "GPUs of an instance (tensor parallel); default: those of 1, 2, 4, 8 that divide --gpus and have room for the load"
    group.add_argument("--tp", type=_list_of(_count), metavar="N,N,…", help=text)
    text = "how prefill and decode share an instance; default: all six, auto first"
    group.add_argument("--modes", type=_modes, metavar="M,M,…", help=text)
    text = "prompt tokens from which on a request is prefilled elsewhere, tried beside the prediction; default 512,2048,8192"
    group.add_argument("--thresholds", type=_list_of(_count), default=[512, 2048, 8192], metavar="N,N,…", help=text)
    text = "do not try the best ones again with every assumption halved and doubled"
    group.add_argument("--no-sensitivity", dest="sensitivity", action="store_false", help=text)
    text = "processes that simulate; default: one for each core"
    group.add_argument("--workers", type=_count, metavar="N", help=text)


def _add_tuned_device(group: argparse._ArgumentGroup) -> None:
    device = group.add_mutually_exclusive_group(required=True)
    device.add_argument("--gpu", choices=GPUS, help="one that was measured by others")
    device.add_argument("--profile", type=Path, metavar="FILE", help="what `pdmux profile` wrote of the model")
    add_assumed(group)
    text = "for serve.yaml, with --gpu: the model's directory or hub id"
    group.add_argument("--checkpoint", metavar="PATH", help=text)
    text = "with --profile of a GPU: its pool (engine.kv_cache_gib)"
    group.add_argument("--kv-cache-gib", type=_positive, metavar="G", help=text)
    text = "with --profile: bytes a second between two instances; default 1e9"
    group.add_argument("--bandwidth", type=_positive, default=1e9, metavar="B", help=text)
    text = "of step times about their prediction, as the deviation of their log; default: what the profile found, on a GPU 0.03"
    group.add_argument("--spread", type=_share, metavar="X", help=text)
    text = "seconds that a message between gateway and instance takes; default 0.0005"
    group.add_argument("--line", type=_share, default=0.0005, metavar="S", help=text)


def add_load(parser: argparse.ArgumentParser) -> None:
    """What every command that offers load to servers takes."""
    _add_out(parser)
    _add_load(parser.add_argument_group("load"))
    workload = parser.add_argument_group("workload")
    _add_source(workload)
    _add_lengths(workload)
    goal = parser.add_argument_group("goal")
    _add_goal(goal)
    text = "that serve together: goodput is per device; default 1"
    goal.add_argument("--devices", type=_count, default=1, metavar="N", help=text)
    _add_server(parser.add_argument_group("server"))


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="where summary.json, requests.jsonl and report.html go"
    )
    parser.add_argument("--force", action="store_true", help="replace the results that DIR has")


def _add_rates(levels: argparse._ActionsContainer) -> None:
    text = "requests a second, sent on time whatever the server does"
    levels.add_argument("--rates", type=_list_of(_positive), metavar="R,R,…", help=text)


def _add_load(group: argparse._ArgumentGroup) -> None:
    levels = group.add_mutually_exclusive_group()
    _add_rates(levels)
    levels.add_argument(
        "--search", type=_range_of(_positive), metavar="LOW:HIGH", help="find the highest rate that holds the attainment"
    )
    text = "instead of rates: so many requests at once (closed loop)"
    levels.add_argument("--concurrency", type=_list_of(_count), metavar="N,N,…", help=text)
    text = "of a search: how near the last rate that held and the first that did not must be; default 0.1"
    group.add_argument("--tolerance", type=_positive, default=0.1, metavar="X", help=text)
    _add_amount(group)


def _add_amount(group: argparse._ArgumentGroup) -> None:
    amount = group.add_mutually_exclusive_group()
    amount.add_argument("--requests", type=_count, metavar="N", help="of each run")
    amount.add_argument("--duration", type=_positive, metavar="S", help="seconds of arrivals of each run; default 60")
    text = "requests sent first in each run that no figure counts; default 0"
    group.add_argument("--warmup", type=_natural, default=0, metavar="N", help=text)
    text = "poisson (the default), gamma:K (K under 1: bursts), or trace (the workload's own times, rescaled)"
    group.add_argument("--arrivals", default="poisson", metavar="A", help=text)
    text = "seconds to wait for answers after the last arrival; what is not done then is a miss; default 60"
    group.add_argument("--drain", type=_positive, default=60.0, metavar="S", help=text)
    text = "same seed, same prompts at the same times; default 0"
    group.add_argument("--seed", type=_natural, default=0, metavar="N", help=text)


def _add_source(group: argparse._ActionsContainer) -> None:
    text = "sharegpt, loogle, openthoughts, tool-agent, mooncake:FILE, azure:FILE, prompts:FILE, fixed:IN,OUT"
    group.add_argument("--workload", metavar="W", help=text)


def _add_lengths(group: argparse._ArgumentGroup) -> None:
    text = "divide the workload's lengths, for a small model"
    group.add_argument("--scale-lengths", type=_positive, default=1.0, metavar="D", help=text)
    group.add_argument("--max-context", type=_count, metavar="N", help="cap prompt and output together")
    text = f"made prompts use these token ids; default {TOKEN_IDS[0]}:{TOKEN_IDS[1]}"
    group.add_argument("--token-ids", type=_range_of(_natural), default=TOKEN_IDS, metavar="LOW:HIGH", help=text)


def _add_goal(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--slo", metavar="SLO", help=SLO_HELP)
    text = "share of requests that must be good; default 0.9"
    group.add_argument("--attainment", type=_fraction, default=0.9, metavar="X", help=text)


def _add_server(group: argparse._ArgumentGroup) -> None:
    text = "chat needs a workload of texts"
    group.add_argument("--endpoint", choices=("completions", "chat"), default="completions", help=text)
    group.add_argument("--model", metavar="NAME", help="default: the first that the server lists")
    _add_api_key(group)


def _add_api_key(group: argparse._ActionsContainer) -> None:
    text = f"default: ${API_KEY_VARIABLE}"
    group.add_argument("--api-key", default=os.environ.get(API_KEY_VARIABLE), metavar="KEY", help=text)


def _run(args: argparse.Namespace) -> int:
    with _extra():
        from pdmux_ray.bench.load.one_server import run
    return run(args)


def _compare(args: argparse.Namespace) -> int:
    with _extra():
        from pdmux_ray.bench.load.compare import compare
    return compare(args)


def _report(args: argparse.Namespace) -> int:
    with _extra():
        from pdmux_ray.bench.load.compare import report
    return report(args.directory)


def _timeline(args: argparse.Namespace) -> int:
    with _extra("timeline"):
        from pdmux_ray.bench.timeline import timeline
    return timeline(args)


def _simulate(args: argparse.Namespace) -> int:
    with _extra("simulate"):
        from pdmux_ray.bench.simulate import simulate
    return simulate(args)


def _tune(args: argparse.Namespace) -> int:
    with _extra("tune"):
        from pdmux_ray.bench.tune import tune
    return tune(args)


@contextmanager
def _extra(command: str = "bench") -> Iterator[None]:
    """Says which extra has a package that is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(f"`pdmux {command}` needs {error.name}: install pdmux-ray[bench].") from None


def _positive(text: str) -> float:
    return _number(text, float, lambda value: 1 / MOST <= value <= MOST, f"a number over 0, at most {MOST:g}")


def _share(text: str) -> float:
    return _number(text, float, lambda value: 0 <= value <= 1, "a number from 0 to 1")


def _fraction(text: str) -> float:
    return _number(text, float, lambda value: 0 < value <= 1, "a share over 0, at most 1")


def _count(text: str) -> int:
    return int(_number(text, int, lambda value: 0 < value <= MOST, f"a whole number over 0, at most {MOST:g}"))


def _natural(text: str) -> int:
    return int(_number(text, int, lambda value: 0 <= value <= MOST, f"a whole number from 0 to {MOST:g}"))


def _number(text: str, kind: Callable[[str], float], right: Callable[[float], bool], what: str) -> float:
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not right(value):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not {what}")
    return value


def _modes(text: str) -> list[Mode]:
    try:
        return list(dict.fromkeys(map(Mode, text.split(","))))
    except ValueError:
        known = ", ".join(mode.value for mode in Mode)
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of modes, which are {known}") from None


def _list_of(one: Callable[[str], float]) -> Callable[[str], list[float]]:
    def parse(text: str) -> list[float]:
        values = [float(one(part)) for part in text.split(",")]
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"{text!r} has a value twice")
        return values

    return parse


def _range_of(one: Callable[[str], Number]) -> Callable[[str], tuple[Number, Number]]:
    def parse(text: str) -> tuple[Number, Number]:
        low, _, high = text.partition(":")
        if not (pair := (one(low), one(high)))[0] < pair[1]:
            raise argparse.ArgumentTypeError(f"{text!r} is not LOW:HIGH with LOW under HIGH")
        return pair

    return parse
