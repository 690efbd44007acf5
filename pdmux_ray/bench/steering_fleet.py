"""The half of `steering` that needs no server: the same question on a simulated fleet of GPUs, two that prefill and two that do
both. What is simulated, and what is not, says `pdmux_ray.sim`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from pdmux_ray.bench import claims, settings
from pdmux_ray.bench.cli import TOKEN_IDS
from pdmux_ray.bench.scaled_work import Mixed
from pdmux_ray.bench.simulated_steering import LONG, PREDICT, SLO, WAYS, Outcome, Way, compare
from pdmux_ray.metrics.goodput import Bound
from pdmux_ray.metrics.summary import Summary
from pdmux_ray.report import figures
from pdmux_ray.report.progress import Progress
from pdmux_ray.workload.requests import Workload
from pdmux_ray.workload.scaling import Scaling
from pdmux_ray.workload.source import TokenWorkload, load_workload

SHAPE = "2P2D, simulated"
STRICTER = (0.95, 0.97)  # attainments that are shown besides: the long prompts are a tenth, so 90 % asks for none of them


def workload(every: int) -> Mixed:
    """Of `every` requests one is long."""
    short, long = load_workload("sharegpt", token_ids=TOKEN_IDS), TokenWorkload(LONG, Scaling(), TOKEN_IDS)
    return Mixed(short, long, every, scattered=True)


def chosen(names: str | None) -> list[Way]:
    """With commas; None: all. Raises ConfigError."""
    by_name = {way.name: way for way in WAYS}
    return [by_name[name] for name in settings.chosen(names or ",".join(by_name), None, tuple(by_name))]


def outcomes(
    work: Workload, rates: Sequence[float], seconds: float, seed: int, console: Console, ways: Sequence[Way]
) -> list[Outcome]:
    """Of every way, one after the other; its rates at the same time, as far as there are cores. Raises ConfigError."""
    found = []
    with Progress(len(ways), console) as progress:
        for done, way in enumerate(ways):
            progress.update(float(done), way.name)
            workers = min(len(rates), os.cpu_count() or 1)
            found += compare([way], work, rates, seconds=seconds, seed=seed, workers=workers)
        progress.update(float(len(ways)), "all ways")
    return found


def found_claims(found: Sequence[Outcome], beats: float) -> list[claims.Claim]:
    """That predicting carries `beats` times what each other way does."""
    ours = next((one for one in found if one.way.name == PREDICT), None)
    if ours is None:
        return []
    return [_claim(ours, other, beats) for other in found if other is not ours]


def _claim(ours: Outcome, other: Outcome, beats: float) -> claims.Claim:
    claim = claims.claim_of(SHAPE, ours.summary, other.summary, beats, other.way.name)
    return replace(claim, target=PREDICT, ci=ours.times_that_of(other, ours.summary.attainment))


def table(found: Sequence[Outcome]) -> list[str]:
    """In Markdown: a row for each way; the share of good requests at each rate, the goodput, why routes were taken in all."""
    rates = [rate for rate, _ in found[0].points]
    heads = ["way", *(f"good at {figures.rate(rate)}/s" for rate in rates), "goodput, requests/s and GPU", "reasons"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for one in found:
        shares = [figures.percent(share) for _, share in one.points]
        lines.append(f"| {' | '.join([one.way.name, *shares, figures.goodput(one.summary), _words(one.reasons)])} |")
    return lines


def goodputs(found: Sequence[Outcome]) -> list[str]:
    """In Markdown: a row for each way, its goodput at each attainment, requests/s and GPU (95 % interval)."""
    attainments = (found[0].summary.attainment, *STRICTER)
    heads = [f"goodput where {figures.percent(attainment)} must be good" for attainment in attainments]
    lines = [f"| {' | '.join(['way', *heads])} |", "|" + "---|" * (1 + len(heads))]
    for one in found:
        cells = [_with_interval(one.at(attainment).summary) for attainment in attainments]
        lines.append(f"| {' | '.join([one.way.name, *cells])} |")
    return lines


def _with_interval(summary: Summary) -> str:
    if summary.goodput_bound != Bound.MEASURED.value:
        return figures.goodput(summary)
    low, high = summary.goodput_ci
    return f"{figures.goodput(summary)} ({figures.significant(low)} to {figures.significant(high)})"


def _words(reasons: Sequence[Mapping[str, int]]) -> str:
    total: dict[str, int] = {}
    for counts in reasons:
        for reason, count in counts.items():
            total[reason] = total.get(reason, 0) + count
    every = sum(total.values())
    return ", ".join(f"{reason} {count / every:.0%}" for reason, count in sorted(total.items(), key=lambda item: -item[1]))


def conclude(directory: Path, found: Sequence[Outcome], beats: float) -> bool:
    """Writes and prints the tables. Whether everything that must hold does."""
    held = found_claims(found, beats)
    lines = [*table(found), "", *goodputs(found), "", "What must hold", "", *claims.table(held)]
    for attainment in STRICTER:
        stricter = found_claims([one.at(attainment) for one in found], beats)
        lines += ["", f"The same where {figures.percent(attainment)} must be good", "", *claims.table(stricter)]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "simulated.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"\n{SHAPE}; SLO: {figures.slo(SLO)}\n\n" + "\n".join(lines))
    return claims.all_hold(held)
