"""`pdmux`: the command line. Importing this module is light; each command imports what it needs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdmux_ray import __version__
from pdmux_ray.bench.cli import add_bench, add_simulate, add_timeline, add_tune, with_action
from pdmux_ray.errors import ConfigError, PdmuxError
from pdmux_ray.gpu_check.command import add_gpu_check
from pdmux_ray.latency.command import add_profile
from pdmux_ray.metrics.dashboards.command import add_dashboards
from pdmux_ray.roles import add_role

if TYPE_CHECKING:
    from pdmux_ray.config import AppConfig
    from pdmux_ray.generate import Completion
    from pdmux_ray.types import SamplingParams

# (flag, type, help) of the fields of SamplingParams that are one number; a flag that is not given leaves the field's default.
_SAMPLING: tuple[tuple[str, type, str], ...] = (
    ("min-tokens", int, "tokens before an end token or stop string counts"),
    ("temperature", float, "0 is greedy; default 1"),
    ("top-p", float, "keep the likeliest tokens that reach this probability together"),
    ("top-k", int, "keep this many tokens; 0: all"),
    ("min-p", float, "keep tokens at least this likely, relative to the likeliest"),
    ("seed", int, "same seed, same text; default: drawn"),
    ("repetition-penalty", float, "over 1 makes tokens seen before less likely"),
    ("presence-penalty", float, "-2 to 2, once for a token generated before"),
    ("frequency-penalty", float, "-2 to 2, for each time a token was generated before"),
    ("logprobs", int, "log probabilities of the chosen token and of this many others (with --json)"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 for a measurement that failed, 2 for a wrong argument, config or request (one line on
    stderr), 130 when interrupted."""
    try:
        args = parser().parse_args(with_action(sys.argv[1:] if argv is None else argv))
        return int(args.run(args))
    except PdmuxError as error:
        print(f"pdmux: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    """Of the command line; `run` of what it returns is the command."""
    parser = argparse.ArgumentParser(prog="pdmux", description="LLM serving on Ray Serve. `scripts/serve` starts a server.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_generate(commands.add_parser("generate", help="answer prompts offline, without Ray"))
    add_bench(commands.add_parser("bench", help="offer load to servers, and tell their latencies and goodput"))
    add_timeline(commands.add_parser("timeline", help="what a server's lanes did lately: a trace, a picture"))
    add_profile(commands.add_parser("profile", help="measure how long steps take here, for policies that predict"))
    add_simulate(commands.add_parser("simulate", help="latencies and goodput of a config, on a device that is not at hand"))
    add_tune(commands.add_parser("tune", help="which topology, TP and modes carry a load on so many GPUs, before you buy them"))
    add_role(commands.add_parser("role", help="list the instances of a running server, or give one another role"))
    add_gpu_check(commands.add_parser("gpu-check", help="check and measure the CUDA device on the GPU at hand"))
    add_dashboards(commands.add_parser("dashboards", help="dashboards for Grafana, rules for Prometheus, or a picture of them"))
    config = commands.add_parser("config", help="look at config files").add_subparsers(required=True, metavar="ACTION")
    check = config.add_parser("check", help="check a Serve config file and print every value it leads to")
    check.add_argument("file", type=Path)
    check.set_defaults(run=_config_check)
    commands.add_parser("version", help="print the version").set_defaults(run=_version)
    return parser


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_generate)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--config", type=Path, metavar="FILE", help="take model and engine from a Serve config file")
    source.add_argument("--model", default="demo", help="'demo' (the default), a Hugging Face directory, or a hub id")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="may be repeated; default: all of standard input")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's message: apply the model's chat template")
    parser.add_argument("--json", action="store_true", help="one JSON object a line for each prompt, when all are done")
    sampling = parser.add_argument_group("sampling")  # each dest but `stop` is the name of a field of SamplingParams
    sampling.add_argument("--max-tokens", type=int, default=256, metavar="N", help="default 256")
    for flag, kind, text in _SAMPLING:
        sampling.add_argument(f"--{flag}", type=kind, metavar="N" if kind is int else "X", help=text)
    sampling.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop string; may be repeated")
    sampling.add_argument(
        "--stop-token-id", dest="stop_token_ids", action="append", type=int, metavar="N", help="may be repeated"
    )
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after an end token")


def _version(args: argparse.Namespace) -> int:
    print(f"pdmux-ray {__version__}")
    return 0


def _config_check(args: argparse.Namespace) -> int:
    import yaml

    from pdmux_ray.config import load_app_config
    from pdmux_ray.engine.sglang_table import load_table
    from pdmux_ray.model.source import local_directory

    config = load_app_config(args.file)
    if config.engine.multiplex.table is not None:
        load_table(config.engine.multiplex.table)
    directory = local_directory(config.model, weights=config.engine.reads_weights)
    print(f"# {args.file} is valid; with the defaults filled in:")
    print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), end="")
    for key, value in _resolved(config).items():
        print(f"# {key}: {value}")
    if directory is None and config.model != "demo":
        print("# model: a hub id, not looked up")
    return 0


def _resolved(config: AppConfig) -> dict[str, str]:
    """What "auto" and null become, as far as that shows without loading torch or a model."""
    from pdmux_ray.config import CPU_KV_CACHE_GIB
    from pdmux_ray.device.cpu.cores import usable_cores
    from pdmux_ray.device.gpus import wants_gpu

    engine, found = config.engine, {}
    on_gpu = wants_gpu(engine)
    if config.served_model_name is None:
        found["served_model_name"] = config.model_name
    if engine.device == "auto":
        found["engine.device"] = "cuda" if on_gpu else "cpu"
    if engine.device != "fake" and engine.dtype == "auto":
        least = "float16" if on_gpu else "float32"
        found["engine.dtype"] = f"bfloat16 where the {'GPU' if on_gpu else 'processor'} computes it natively, else {least}"
    if engine.device != "fake" and engine.kv_cache_gib is None:
        share = f"{engine.cuda.kv_share:.0%} of what is left of the GPU's memory"
        found["engine.kv_cache_gib"] = share if on_gpu else f"{CPU_KV_CACHE_GIB:g}"
    if engine.device != "fake" and not on_gpu and engine.threads is None:
        found["engine.threads"] = f"{usable_cores()} on this machine"
    if engine.context_length is None:
        found["engine.context_length"] = "what the model states"
    return found


def _generate(args: argparse.Namespace) -> int:
    config, params = _app_config(args), sampling_params(args)
    prompts: list[str] = args.prompt or [sys.stdin.read().removesuffix("\n")]
    from pdmux_ray.generate import Generator

    with Generator(config) as generator:
        inputs = [generator.tokenizer.chat([{"role": "user", "content": p}]) for p in prompts] if args.chat else prompts
        live = len(prompts) == 1 and not args.json
        completions = generator.generate(inputs, params, tuple(args.stop), on_text=_print_now if live else None)
    for completion in completions:
        print(json.dumps(_as_json(completion)) if args.json else "" if live else completion.text)
    return 0


def _print_now(index: int, text: str) -> None:
    print(text, end="", flush=True)


def _app_config(args: argparse.Namespace) -> AppConfig:
    from pdmux_ray.config import load_app_config, parse_app_config

    return load_app_config(args.config) if args.config else parse_app_config({"model": args.model})


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Of the flags of `pdmux generate`. Raises ConfigError, RequestError."""
    from pdmux_ray.types import SamplingParams

    names = {field.name for field in dataclasses.fields(SamplingParams)}
    given: dict[str, Any] = {name: value for name, value in vars(args).items() if name in names and value is not None}
    given.setdefault("seed", secrets.randbits(63))
    given["stop_token_ids"] = tuple(given.get("stop_token_ids", ()))
    if "logprobs" in given and not args.json:
        raise ConfigError("--logprobs needs --json: there is no other place to show them")
    return SamplingParams(**given)


def _as_json(completion: Completion) -> dict[str, Any]:
    return {
        "text": completion.text,
        "finish_reason": completion.finish.value if completion.finish else None,
        "prompt_tokens": completion.prompt_tokens,
        "cached_tokens": completion.cached_tokens,
        "token_ids": completion.token_ids,
        "logprobs": [{"logprob": entry.logprob, "top": entry.top} for entry in completion.logprobs],
    }


if __name__ == "__main__":
    sys.exit(main())
