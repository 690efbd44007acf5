"""Compares two servers of the same model directory: median ITL under concurrency, TTFT of long prompts.

    python -m pdmux_ray.bench.peer --model DIR --peer 'COMMAND {model} {port}' [--ours 'COMMAND {model} {port}'] [--rounds 2]

Each command serves the Hugging Face directory {model} on loopback port {port}. The servers run one after the other (never
together: an idle one would still take CPU), `--rounds` times in turn, so that a drift of the machine shows as a spread.
Prompts are random token ids, different for every request, so no prefix cache helps; both servers get the same ones.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence

import aiohttp

from pdmux_ray.bench import server
from pdmux_ray.bench.load import client
from pdmux_ray.bench.load.client import Target
from pdmux_ray.errors import PdmuxError
from pdmux_ray.metrics.lifeline import Ending, Lifeline
from pdmux_ray.workload.requests import Ask, PlannedRequest

ITL_CONCURRENCY = (1, 4, 8, 16)
ITL_PROMPT_TOKENS = 64
ITL_OUTPUT_TOKENS = 96
ITL_SKIP = 8  # first gaps of each stream: other streams' prefills are still running
TTFT_PROMPT_TOKENS = (256, 1024, 2048)
TTFT_REPEATS = 5
VOCABULARY = (1000, 40000)  # token ids drawn from here: ordinary words of any model

Samples = dict[str, list[float]]  # "ITL 4" or "TTFT 1024" -> seconds


async def measure(url: str, model: str, rng: random.Random) -> Samples:
    """All samples of one server, in a fixed order. Raises PdmuxError when an answer is wrong or incomplete."""
    samples: Samples = defaultdict(list)
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        answer = await client.ask(session, url, model, "What is the capital of France?")
        if "Paris" not in answer:
            raise PdmuxError(f"{url} answers wrongly, its speed means nothing: {answer!r}")
        target = await client.probed(session, Target(url, model))
        await complete(session, target, _prompt(rng, 300), 8)  # warm-up
        for n in ITL_CONCURRENCY:
            prompts = [_prompt(rng, ITL_PROMPT_TOKENS) for _ in range(n)]
            streams = [complete(session, target, p, ITL_OUTPUT_TOKENS) for p in prompts]
            for lifeline in await asyncio.gather(*streams):
                samples[f"ITL {n}"] += lifeline.gaps_s[ITL_SKIP:]
        for tokens in TTFT_PROMPT_TOKENS:
            for _ in range(TTFT_REPEATS):
                lifeline = await complete(session, target, _prompt(rng, tokens), 2)
                samples[f"TTFT {tokens}"].append(lifeline.token_s[0] - lifeline.sent_s)
    return samples


async def complete(session: aiohttp.ClientSession, target: Target, prompt: Sequence[int], tokens: int) -> Lifeline:
    """One answer of exactly `tokens` tokens. Raises PdmuxError when it is anything else."""
    planned = PlannedRequest(0, 0.0, Ask(tuple(prompt), tokens))
    lifeline = await client.send(session, target, planned, time.perf_counter())
    if lifeline.ending is not Ending.COMPLETE or len(lifeline.token_s) != tokens:
        what = f"{lifeline.ending.value}, {len(lifeline.token_s)} came, {lifeline.error}"
        raise PdmuxError(f"{target.url} did not deliver {tokens} tokens: {what}")
    return lifeline


def _prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(*VOCABULARY) for _ in range(tokens)]


async def _measure_server(url: str, seed: int) -> Samples:
    return await measure(url, await server.model_name(url), random.Random(seed))


def compare(ours: str, peer: str, model: str, rounds: int) -> tuple[Samples, Samples]:
    """Runs both servers in turn, `rounds` times; the same prompts for both within a round."""
    totals: tuple[Samples, Samples] = (defaultdict(list), defaultdict(list))
    begun, done = time.monotonic(), 0
    for round_index in range(rounds):
        for name, command, total in (("ours", ours, totals[0]), ("peer", peer, totals[1])):
            left = f", about {(time.monotonic() - begun) / done * (2 * rounds - done):.0f} s left" if done else ""
            print(f"round {round_index + 1} of {rounds}: {name}{left}", file=sys.stderr, flush=True)
            done += 1
            with server.running(command, model) as started:
                for key, values in asyncio.run(_measure_server(started.url, seed=round_index)).items():
                    total[key].append(statistics.median(values))
    return totals


def table(ours: Samples, peer: Samples, limit: float) -> list[str]:
    """One line per measure: the median over rounds of each round's median, in milliseconds, and the ratio."""
    lines = [f"{'':14}{'ours ms':>10}{'peer ms':>10}{'ratio':>8}   limit {limit}   (each round: ours/peer)"]
    for key in ours:
        a, b = statistics.median(ours[key]), statistics.median(peer[key])
        rounds = "  ".join(f"{x * 1e3:.1f}/{y * 1e3:.1f}" for x, y in zip(ours[key], peer[key], strict=True))
        lines.append(f"{key:14}{a * 1e3:10.1f}{b * 1e3:10.1f}{a / b:8.2f}   {'ok' if a / b <= limit else 'OVER':5}   {rounds}")
    return lines


def plot(ours: Samples, peer: Samples, path: str) -> None:
    """Bars of the medians: ITL on the left, TTFT on the right; the ratio stands above ours."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, (kind, unit) in zip(
        figure.subplots(1, 2), (("ITL", "concurrent requests"), ("TTFT", "prompt tokens")), strict=True
    ):
        keys = [key for key in ours if key.startswith(f"{kind} ")]
        for offset, name, samples, colour in ((-0.2, "ours", ours, "#2a7f62"), (0.2, "peer", peer, "#b0b7bd")):
            heights = [statistics.median(samples[key]) * 1e3 for key in keys]
            bars = axes.bar([i + offset for i in range(len(keys))], heights, 0.4, label=name, color=colour)
            if name == "ours":
                axes.bar_label(
                    bars, [f"{statistics.median(ours[k]) / statistics.median(peer[k]):.2f} ×" for k in keys], padding=2
                )
        axes.set(title=f"median {kind}, ms (lower is better)", xlabel=unit, xticks=range(len(keys)))
        axes.set_xticklabels([key.split()[1] for key in keys])
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pdmux_ray.bench.peer", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="Hugging Face directory that both serve")
    parser.add_argument("--peer", required=True, help="command of the other server, with {model} and {port}")
    parser.add_argument("--ours", default="scripts/serve --set model={model} --port {port}", help="command of ours")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--plot", help="also draw the table into this PNG file")
    parser.add_argument("--limit", type=float, default=0.8, help="ratio to stay under")
    args = parser.parse_args(argv)
    ours, peer = compare(args.ours, args.peer, args.model, args.rounds)
    lines = table(ours, peer, args.limit)
    print("\n".join(lines))
    if args.plot:
        plot(ours, peer, args.plot)
    return 1 if any("OVER" in line for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
