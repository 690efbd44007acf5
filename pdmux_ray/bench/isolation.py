"""What people who read tokens notice when a long prompt arrives: 4 requests decode, then a prompt of 2,048 tokens comes.

    python -m pdmux_ray.bench.isolation [--profile FILE] [--peer 'COMMAND {model} {port}'] [--targets T,T,…] [--repeats 5]

Through the whole HTTP path, one server at a time. Of each repetition count the gaps of the four streams from when all of them
run smoothly to the long prompt's sending ("alone"), and those that overlap the time from then to its first token ("beside").
Exit code 1 when `auto` or `split` misses a limit: its largest gap beside the prompt, or their p99, over the median alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import aiohttp
from rich.console import Console

from pdmux_ray.bench import settings
from pdmux_ray.bench.cli import TOKEN_IDS
from pdmux_ray.bench.load import client, targets
from pdmux_ray.bench.load.client import Target
from pdmux_ray.bench.load.generator import run as run_loop
from pdmux_ray.errors import PdmuxError
from pdmux_ray.metrics.goodput import Slo
from pdmux_ray.metrics.lifeline import Ending, Lifeline, quantile
from pdmux_ray.metrics.slo_text import SloText
from pdmux_ray.model.source import resolve
from pdmux_ray.report import figures
from pdmux_ray.report.progress import Progress
from pdmux_ray.report.table import print_line
from pdmux_ray.text.tokenizer import Tokenizer
from pdmux_ray.workload.requests import Ask, PlannedRequest

STREAMS = 4
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 900  # more than any server gives until the long prompt has its first token; the rest is left
LONG_TOKENS = 2048
LONG_OUTPUT_TOKENS = 4
SKIPPED = 8  # first tokens of each stream: other streams' prefills are still running
ALONE_S = 1.0
SETTLE_S = 0.5  # after a repetition: what was left leaves the server
PATIENCE_S = 60.0  # with a repetition
REPETITION_S = 5.0  # for the forecast
SMALL_CHUNKS = ("chunked-64", "chunked-128")  # not among the default: larger ones show what chunks do to readers
TARGETS = (settings.AUTO, *(name for name in settings.FIXED if name not in SMALL_CHUNKS))
JUDGED = (settings.AUTO, "split")
LARGEST_LIMIT, P99_LIMIT = 3.0, 2.5  # over the median alone
SLO = "ttft=5x,itl=2.5x"  # AUTO uses up what an ITL objective allows: one of 3x plans steps as long as the largest gap may be

# Plain sentences, so that the model answers in plain words and every token has text to send: the streams' prompts are cut from
# the text that they make, each at another place.
TEXT = (
    "The river runs past the old mill and under two stone bridges before it reaches the town. In spring it is high and "
    "brown, and the children are told to stay away from the banks. In summer it is low, and they build small dams of "
    "pebbles that last until the next rain. The miller's house is empty now, but the wheel still turns a little when the "
    "water is strong. On market days people come from the villages around with eggs, cheese and apples, and the square is "
    "full of voices until noon. Then the carts leave one after another, the dogs lie down in the shade, and the baker "
    "sweeps the steps of his shop. An old woman at the corner who sells flowers says that nothing has changed in fifty "
    "years, and that she hopes nothing will."
)


@dataclass(slots=True)
class Gaps:
    """Of one target, all repetitions together. Seconds."""

    alone_s: list[float] = field(default_factory=list)
    beside_s: list[float] = field(default_factory=list)
    largest_s: list[float] = field(default_factory=list)  # beside the prompt, one of each repetition
    ttft_s: list[float] = field(default_factory=list)  # of the long prompt

    @property
    def median_s(self) -> float:
        return statistics.median(self.alone_s)

    @property
    def p99_s(self) -> float:
        return quantile(sorted(self.beside_s), 0.99)

    @property
    def holds(self) -> bool:
        return max(self.largest_s) <= LARGEST_LIMIT * self.median_s and self.p99_s <= P99_LIMIT * self.median_s

    def add(self, streams: Sequence[Lifeline], long: Lifeline) -> None:
        """One repetition, whose streams all had gaps before and after the long prompt was sent."""
        settled_s = max(lifeline.token_s[SKIPPED] for lifeline in streams)
        split = [split_gaps(stream.token_s, settled_s, long.sent_s, long.token_s[0]) for stream in streams]
        beside = [gap for _, gaps in split for gap in gaps]
        self.alone_s += [gap for gaps, _ in split for gap in gaps]
        self.beside_s += beside
        self.largest_s.append(max(beside))
        self.ttft_s.append(long.token_s[0] - long.sent_s)


def split_gaps(token_s: Sequence[float], settled_s: float, sent_s: float, first_s: float) -> tuple[list[float], list[float]]:
    """A stream's gaps that lie between `settled_s` and `sent_s`, and those that overlap `sent_s` to `first_s`. Tokens that came
    together are one arrival."""
    alone, beside = [], []
    for before, after in pairwise(token_s):
        if after == before:
            continue
        if settled_s <= before and after <= sent_s:
            alone.append(after - before)
        elif after > sent_s and before < first_s:
            beside.append(after - before)
    return alone, beside


@dataclass(frozen=True, slots=True)
class Prompts:
    """The same for all servers; none of a server's repetitions finds a long prompt's beginning in its prefix cache."""

    text: Sequence[int]  # of TEXT, at least PROMPT_TOKENS + STREAMS

    def stream(self, repetition: int, index: int) -> tuple[int, ...]:
        start = (repetition * STREAMS + index) * 7 % (len(self.text) - PROMPT_TOKENS)
        return tuple(self.text[start : start + PROMPT_TOKENS])

    def long(self, repetition: int) -> tuple[int, ...]:
        return tuple(random.Random(repetition).choices(range(*TOKEN_IDS), k=LONG_TOKENS))


async def repetition(target: Target, prompts: Prompts, number: int, gaps: Gaps) -> None:
    """Raises PdmuxError when an answer is wrong or incomplete."""
    async with client.session() as session:
        start_s = time.perf_counter()
        asks = [Ask(prompts.stream(number, index), OUTPUT_TOKENS) for index in range(STREAMS)]
        streams = [client.new_lifeline(PlannedRequest(0, 0.0, ask), start_s) for ask in asks]
        tasks = [
            asyncio.create_task(client.stream(session, target, client.body(target, ask), lifeline))
            for ask, lifeline in zip(asks, streams, strict=True)
        ]
        try:
            async with asyncio.timeout(PATIENCE_S):
                await _all_have(streams, SKIPPED + 1)
                await asyncio.sleep(ALONE_S)
                long = await _long(session, target, prompts.long(number))
                await _all_have(streams, 1, after_s=long.token_s[0])
        except TimeoutError:
            raise PdmuxError(f"{target.url} did not get through a repetition in {PATIENCE_S:.0f} s") from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    gaps.add(streams, long)
    await asyncio.sleep(SETTLE_S)


async def _long(session: aiohttp.ClientSession, target: Target, prompt: tuple[int, ...]) -> Lifeline:
    planned = PlannedRequest(0, 0.0, Ask(prompt, LONG_OUTPUT_TOKENS))
    lifeline = await client.send(session, target, planned, time.perf_counter())
    if lifeline.ending is not Ending.COMPLETE:
        raise PdmuxError(f"{target.url} did not answer the long prompt ({lifeline.ending.value}): {lifeline.error}")
    return lifeline


async def _all_have(streams: Sequence[Lifeline], tokens: int, after_s: float = 0.0) -> None:
    """Until each stream has so many tokens, the last of them later than `after_s`. Raises PdmuxError when one has ended."""
    while True:
        behind = [s for s in streams if len(s.token_s) < tokens or s.token_s[-1] <= after_s]
        if not behind:
            return
        if ended := next((s for s in behind if s.ending is not Ending.UNFINISHED), None):
            raise PdmuxError(f"a stream ended after {len(ended.token_s)} tokens ({ended.ending.value}): {ended.error}")
        await asyncio.sleep(0.005)


def objectives(model: Path, slo: str, console: Console) -> Slo:
    """From the latencies of an idle server. Raises PdmuxError when it does not start or answer, or `slo` is none."""
    with settings.served(settings.command(settings.YARDSTICK), model) as target:
        asks = [Ask(tuple(range(TOKEN_IDS[0], TOKEN_IDS[0] + n)), 32) for n in (PROMPT_TOKENS, LONG_TOKENS // 2, LONG_TOKENS)]
        solo = run_loop(targets.measure_solo(target, targets.plan_solo(asks, TOKEN_IDS, None)))
    resolved = SloText.parse(slo).resolve(solo)
    print_line(console, f"{solo}; objectives of the lanes' modes: {figures.slo(resolved)}")
    return resolved


def measure(
    names: Sequence[str], slo: Slo | None, profile: Path | None, args: argparse.Namespace, console: Console
) -> tuple[dict[str, Gaps], list[str]]:
    """What was measured, and what went wrong."""
    model = resolve(args.model)
    prompts = Prompts(Tokenizer.load(model).encode(TEXT))
    found: dict[str, Gaps] = {}
    failures = []
    with Progress(len(names) * args.repeats, console) as progress:
        for place, name in enumerate(names):
            progress.update(place * args.repeats, f"starting {name}")
            gaps = Gaps()
            try:
                with settings.served(settings.command(name, profile, slo, args.peer), model) as target:
                    run_loop(repetition(target, prompts, args.repeats, Gaps()))  # warms up
                    for number in range(args.repeats):
                        run_loop(repetition(target, prompts, number, gaps))
                        progress.update(place * args.repeats + number + 1, f"{name}: repetition {number + 1}")
            except PdmuxError as error:
                print_line(console, f"{name}: {error}")
                failures.append(f"{name}: {str(error).strip().splitlines()[-1]}")
            if gaps.ttft_s:
                found[name] = gaps
    return found, failures


def table(found: dict[str, Gaps]) -> list[str]:
    """In Markdown. Milliseconds, but for the TTFT."""
    lines = [
        f"| {STREAMS} streams, a prompt of {LONG_TOKENS} tokens comes | median alone | median beside | p99 beside | largest | "
        "of each repetition | TTFT of the prompt, s | gaps beside | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, gaps in found.items():
        base_s = gaps.median_s
        columns = (statistics.median(gaps.beside_s), gaps.p99_s, max(gaps.largest_s))
        cells = [name, figures.ms(base_s), *(f"{figures.ms(s)} ({s / base_s:.2f}×)" for s in columns)]
        cells.append(", ".join(f"{largest_s / base_s:.1f}" for largest_s in gaps.largest_s) + " ×")
        verdict = ("holds" if gaps.holds else "MISSED") if name in JUDGED else ""
        cells += [f"{statistics.median(gaps.ttft_s):.2f}", str(len(gaps.beside_s)), verdict]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    parser = argparse.ArgumentParser(prog="python -m pdmux_ray.bench.isolation", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--peer", metavar="COMMAND", help="of another server, with {model} and {port}; without it only ours run"
    )
    text = f"of {', '.join(settings.NAMES)} and peer; default: {','.join(TARGETS)} and the peer, if there is one"
    parser.add_argument("--targets", metavar="T,T,…", help=text)
    text = "that `pdmux profile` has made of this machine; without it one is measured first (at most 10 minutes)"
    parser.add_argument("--profile", type=Path, metavar="FILE", help=text)
    parser.add_argument("--repeats", type=int, default=5, help="of each target; default 5")
    parser.add_argument("--model", default="demo", help="Hugging Face directory that all serve; default: the demo model")
    parser.add_argument("--slo", default=SLO, metavar="SLO", help=f"what the lanes' modes plan by; default {SLO}")
    parser.add_argument("--out", type=Path, default=Path("isolation"), metavar="DIR", help="of a profile that is made")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 when a limit is missed or something was not measured, 2 for a wrong argument, 130 after Ctrl-C."""
    args, console = parser().parse_args(argv), Console(stderr=True)
    with contextlib.suppress(KeyboardInterrupt):
        try:
            names = settings.chosen(args.targets or ",".join([*TARGETS, *([settings.PEER] if args.peer else [])]), args.peer)
            seconds = settings.START_S + settings.start_s(names) + len(names) * (args.repeats + 1) * REPETITION_S
            print_line(console, f"{len(names)} servers, one at a time: {', '.join(names)}; {args.repeats} repetitions each")
            print_line(console, f"about {seconds / 60:.0f} minutes")
            profile = settings.profile_for(names, args.profile, resolve(args.model), args.out, console)
            slo = objectives(resolve(args.model), args.slo, console) if settings.have_lanes(names) else None
        except PdmuxError as error:
            print(f"isolation: {error}", file=sys.stderr)
            return 2
        found, failures = measure(names, slo, profile, args, console)
        print("\n".join(table(found)))
        print(f"\nlimits for {' and '.join(JUDGED)}: largest ≤ {LARGEST_LIMIT:g}×, p99 ≤ {P99_LIMIT:g}× the median alone")
        for failure in failures:
            print(f"not measured: {failure}")
        judged = [found[name].holds for name in JUDGED if name in found]
        return 0 if judged and all(judged) and not failures else 1
    return 130


if __name__ == "__main__":
    settings.end_in_order()
    sys.exit(main())
