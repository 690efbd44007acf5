"""The figures of workloads as they are made, for docs/workloads.md: a table and a picture of their lengths.

python -m pdmux_ray.bench.workload_figures sharegpt loogle mooncake:FILE [--count 10000] [--plot FILE.png]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pdmux_ray.errors import PdmuxError
from pdmux_ray.workload.outline import Outline, reusable_fraction
from pdmux_ray.workload.source import SPECS, TokenWorkload, load_workload
from pdmux_ray.workload.traces import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SEED = 0
COLOURS = ("#2a7f62", "#c8553d", "#3d6fb4", "#8c6bb1", "#b8860b", "#5a5a5a")


def outlines_of(spec: str, count: int) -> tuple[str, list[Outline]]:
    """(name, requests) of a workload of token ids; of a trace all there are. Raises PdmuxError."""
    workload = load_workload(spec, token_ids=(0, 1000))
    if not isinstance(workload, TokenWorkload):
        raise PdmuxError(f"{spec} has texts; how many tokens they have is up to a tokenizer.")
    source = workload.source
    return workload.name, workload.outlines(len(source.requests) if isinstance(source, Trace) else count, SEED)


def row(name: str, outlines: Sequence[Outline]) -> str:
    """One of a Markdown table: requests; mean, p50, p90, p99, most of prompt and output tokens; reusable blocks."""
    return f"| {name} | {len(outlines):,} | {_summary(prompts(outlines))} | {_summary(outputs(outlines))} | " + (
        f"{reusable_fraction(outlines):.1%} |"
    )


def prompts(outlines: Sequence[Outline]) -> list[int]:
    return [outline.prompt_tokens for outline in outlines]


def outputs(outlines: Sequence[Outline]) -> list[int]:
    return [outline.output_tokens for outline in outlines]


def _summary(tokens: Sequence[int]) -> str:
    values = (np.mean(tokens), *np.percentile(tokens, [50, 90, 99]), max(tokens))
    return " / ".join(f"{value:,.0f}" for value in values)


def plot(workloads: Sequence[tuple[str, list[Outline]]], path: str) -> None:
    """Shares of requests that are at most so long, prompts on the left, outputs on the right, on a logarithmic axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for (name, outlines), colour in zip(workloads, COLOURS, strict=False):
        _draw(left, name, prompts(outlines), colour)
        _draw(right, name, outputs(outlines), colour)
    left.set(title="prompt tokens", ylabel="share of requests at most so long", ylim=(0, 1))
    right.set(title="output tokens")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=120)


def _draw(axes: Axes, name: str, tokens: Sequence[int], colour: str) -> None:
    shares = np.linspace(0, 1, 401)
    axes.plot(np.maximum(np.quantile(tokens, shares), 1), shares, label=name, color=colour, linewidth=1.8)
    axes.set_xscale("log")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pdmux_ray.bench.workload_figures", description=__doc__.splitlines()[0], epilog="; ".join(SPECS)
    )
    parser.add_argument("specs", nargs="+", metavar="WORKLOAD")
    parser.add_argument("--count", type=int, default=10_000, help="requests of those that are not traces")
    parser.add_argument("--plot", metavar="PNG")
    args = parser.parse_args(argv)
    workloads = [outlines_of(spec, args.count) for spec in args.specs]
    print("\n".join(row(name, outlines) for name, outlines in workloads))
    if args.plot:
        plot(workloads, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
