"""`python -m pdmux_ray.bench.profile_figure PROFILE --plot FILE`: a profile's curves as one picture, for docs/profiling.md.

Marks are measured medians with their p10 to p90, lines are the model, bands reach up to its 99 % bound.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pdmux_ray.errors import PdmuxError
from pdmux_ray.latency.model import FittedCosts
from pdmux_ray.latency.profile import MeasuredPoint, Profile, read
from pdmux_ray.policy.views import Estimate, Piece

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#2a7f62", "#c8553d", "#3d6fb4", "#8c6bb1", "#b8860b", "#5a5a5a")
MS = 1e3

Part = tuple[int, int]  # units, units of the other lane


def plot(profile: Profile, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    (decode, context), (prefill, held_out) = figure.subplots(2, 2)
    _decode(decode, profile)
    _context(context, profile)
    _prefill(prefill, profile)
    _held_out(held_out, profile)
    figure.savefig(path, dpi=110)


def _decode(axes: Axes, profile: Profile) -> None:
    costs = profile.costs()
    most = max(point.batch for point in profile.points)
    for colour, (units, beside) in _parts(profile, "decode"):
        _line(axes, _label(units, beside, "prefill"), colour, (1, most), partial(_decode_of, costs, units, beside))
        seen = [p for p in profile.points if (p.kind, p.units, p.beside) == ("decode", units, beside)]
        _marks(axes, [(p.batch, p) for p in seen if p.context_tokens <= 48 * p.batch], colour)
    axes.set(title="decode step over the batch, 32 tokens of context each", xlabel="requests", ylabel="ms")
    axes.set_xscale("log", base=2)
    axes.legend(frameon=False)


def _context(axes: Axes, profile: Profile, batch: int = 8) -> None:
    costs = profile.costs()
    for colour, (units, beside) in _parts(profile, "decode"):
        if beside:
            continue
        seen = [
            p for p in profile.points if (p.kind, p.units, p.beside, p.batch) == ("decode", units, 0, batch) and p.role == "fit"
        ]
        ends = (64, max((p.context_tokens for p in seen), default=1024))
        _line(axes, _label(units, 0), colour, ends, partial(_context_of, costs, batch, units))
        _marks(axes, [(p.context_tokens, p) for p in seen], colour)
    axes.set(title=f"decode step of {batch} over the context", xlabel="context tokens of the batch", ylabel="ms")
    axes.legend(frameon=False)


def _prefill(axes: Axes, profile: Profile) -> None:
    costs, layers = profile.costs(), profile.parameters.layers
    points = [p for p in profile.points if p.kind == "prefill" and len(p.pieces) == 1 and not p.pieces[0][1] and not p.last]
    for colour, (units, beside) in _parts(profile, "prefill"):
        if units + beside > profile.parameters.units:
            continue
        _line(
            axes,
            *(_label(units, beside, "decode"), colour, (8, max(p.pieces[0][0] for p in points))),
            partial(_prefill_of, costs, layers, units, beside),
            1 / layers,
        )
        seen = [p for p in points if (p.units, p.beside) == (units, beside)]
        _marks(axes, [(p.pieces[0][0], p) for p in seen], colour, per_layer=True)
    axes.set(title="a layer of a prefill", xlabel="new tokens", ylabel="ms a layer", xscale="log", yscale="log")
    axes.legend(frameon=False)


def _held_out(axes: Axes, profile: Profile) -> None:
    for kind, colour in zip(("decode", "prefill", "mixed"), COLOURS, strict=False):
        for shares in (False, True):
            held = [p for p in profile.points if p.role == "test" and p.kind == kind and _shares(p, profile) == shares]
            x, y = [MS * p.predicted_s for p in held], [MS * p.percentiles_s[1] for p in held]
            label = f"{kind}, the other lane on the same core" if shares else kind
            axes.plot(x, y, "x" if shares else "o", color=colour, markersize=4, alpha=0.7, label=label if held else None)
    ends = [MS * end(p.predicted_s for p in profile.points if p.role == "test") for end in (min, max)]
    axes.plot(ends, ends, color="#999999", linewidth=1)
    axes.set(title="held-out work", xlabel="predicted, ms", ylabel="measured median, ms", xscale="log", yscale="log")
    axes.legend(frameon=False)


def _shares(point: MeasuredPoint, profile: Profile) -> bool:
    return bool(point.beside) and point.units + point.beside > profile.parameters.units


def _decode_of(costs: FittedCosts, units: int, beside: int, batch: int) -> Estimate:
    return costs.decode(batch, 32 * batch, units, beside)


def _context_of(costs: FittedCosts, batch: int, units: int, context_tokens: int) -> Estimate:
    return costs.decode(batch, context_tokens, units, 0)


def _prefill_of(costs: FittedCosts, layers: int, units: int, beside: int, tokens: int) -> Estimate:
    return costs.prefill([Piece(tokens, 0)], layers, units, beside, last=True)


def _parts(profile: Profile, kind: str) -> list[tuple[str, Part]]:
    found = sorted({(p.units, p.beside) for p in profile.points if p.kind == kind}, key=lambda part: (part[1] > 0, -part[0]))
    return list(zip(COLOURS, found, strict=False))


def _label(units: int, beside: int, other: str = "") -> str:
    cores = f"{units} core" + "s" * (units > 1)
    return f"{cores}, {other} on {beside} beside" if beside else cores


def _line(
    axes: Axes, label: str, colour: str, ends: tuple[int, int], of: Callable[[int], Estimate], scale: float = 1.0
) -> None:
    x = sorted({round(value) for value in np.geomspace(*ends, 80)})
    low, high = (np.array(values) * MS * scale for values in zip(*map(of, x), strict=True))
    axes.plot(x, low, color=colour, linewidth=1.8, label=label)
    axes.fill_between(x, low, high, color=colour, alpha=0.1)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _marks(axes: Axes, points: Sequence[tuple[int, MeasuredPoint]], colour: str, per_layer: bool = False) -> None:
    if not points:
        return
    x, times = [x for x, _ in points], [np.array(p.percentiles_s[:3]) * MS / (p.layers if per_layer else 1) for _, p in points]
    low, middle, high = np.array(times).T
    spread = [middle - low, high - middle]
    axes.errorbar(x, middle, yerr=spread, fmt="o", color=colour, markersize=3.5, linewidth=0.8, alpha=0.8)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path)
    parser.add_argument("--plot", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(argv)
    try:
        plot(read(args.profile), args.plot)
    except PdmuxError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
