"""The curves of a profile as one self-contained page: what was measured (marks) against what the model says (lines)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdmux_ray.latency.profile import MeasuredPoint, Probe, Profile
from pdmux_ray.policy.views import Piece
from pdmux_ray.report.marks import SERIES, Line, Spec, chart, colour, log_scale, rounded
from pdmux_ray.report.page import Chart, Key, Notes, Row, Section, Table, render

STEPS = 48  # points of a line


def write_page(profile: Profile, path: Path) -> None:
    """The curves, as one HTML file without network. Raises OSError."""
    path.write_text(page(profile), encoding="utf-8")


def page(profile: Profile) -> str:
    identity = profile.identity
    lead = f"{identity.model} in {identity.dtype} on {identity.device}; measured in {profile.took_s:.0f} s."
    return render("Latency profile", sections(profile), lead)


def sections(profile: Profile) -> list[Section]:
    return [
        Section("How good it is", [_qualities(profile)], "On work that the model was not fitted to."),
        Section("Decode", [decode_chart(profile), context_chart(profile)]),
        Section("Prefill", [prefill_chart(profile)]),
        Section("Held-out work", [accuracy_chart(profile)]),
        Section("The hardware", [_probe(profile.probe)]),
        Section("What it is of", [Notes([f"{name}: {value}" for name, value in profile.identity.model_dump().items()])]),
    ]


def decode_chart(profile: Profile) -> Chart:
    """Over the batch, at about 32 tokens of context a request."""
    parts = _parts(profile, "decode")
    costs, most = profile.costs(), max(p.batch for p in profile.points)
    rows = [
        {"series": name, "x": batch, "y": 1e3 * costs.decode(batch, 32 * batch, units, beside).predicted_s}
        for name, units, beside in parts
        for batch in _grid(1, most)
    ]
    seen = [
        _mark(name, p.batch, p)
        for name, units, beside in parts
        for p in profile.points
        if (p.kind, p.units, p.beside) == ("decode", units, beside) and p.context_tokens <= 48 * p.batch
    ]
    return _curves(
        "A decode step over the batch", "requests in the batch", parts, rows, seen, "Lines: 32 tokens of context each."
    )


def context_chart(profile: Profile) -> Chart:
    """Over the context, at the largest batch of the grid that had three contexts."""
    batch = 8
    parts = [part for part in _parts(profile, "decode") if not part[2]]
    points = [p for p in profile.points if p.kind == "decode" and not p.beside and p.batch == batch]
    costs, most = profile.costs(), max((p.context_tokens for p in points), default=1024)
    rows = [
        {"series": name, "x": context, "y": 1e3 * costs.decode(batch, context, units, beside).predicted_s}
        for name, units, beside in parts
        for context in _grid(64, most)
    ]
    seen = [_mark(name, p.context_tokens, p) for name, units, _ in parts for p in points if p.units == units]
    return _curves(f"A decode step of {batch} over the context", "context tokens of the batch", parts, rows, seen)


def prefill_chart(profile: Profile) -> Chart:
    """A layer over the new tokens, none reused."""
    parts = _parts(profile, "prefill")
    costs, layers = profile.costs(), profile.parameters.layers
    points = [p for p in profile.points if p.kind == "prefill" and len(p.pieces) == 1 and not p.pieces[0][1]]
    most = max((p.pieces[0][0] for p in points), default=512)
    rows = [
        {"series": name, "x": n, "y": 1e3 * costs.prefill([Piece(n, 0)], layers, units, beside, last=True).predicted_s / layers}
        for name, units, beside in parts
        for n in _grid(8, most)
    ]
    seen = [
        _mark(name, p.pieces[0][0], p, p.layers)
        for name, units, beside in parts
        for p in points
        if (p.units, p.beside) == (units, beside)
    ]
    return _curves(
        "A layer of a prefill", "new tokens", parts, rows, seen, "Milliseconds a layer, of blocks of several layers."
    )


def accuracy_chart(profile: Profile) -> Chart:
    """Measured over predicted medians of the points that the model has not seen."""
    kinds = ("decode", "prefill", "mixed")
    lines = [Line(kind, tint) for kind, tint in zip(kinds, SERIES[:3], strict=True)]
    held = [p for p in profile.points if p.role == "test"]
    seen = rounded([{"series": p.kind, "x": 1e3 * p.predicted_s, "y": 1e3 * p.percentiles_s[1]} for p in held])
    ends = (min(min(r["x"], r["y"]) for r in seen), max(max(r["x"], r["y"]) for r in seen))
    axis = {"type": "quantitative", "scale": log_scale(ends)}
    x, y = axis | {"title": "predicted, ms"}, axis | {"title": "measured median, ms"}
    diagonal = [{"x": end, "y": end} for end in ends]
    spec = chart(
        [
            {"data": {"values": diagonal}, "mark": {"type": "line", "style": "limit"}, "encoding": _xy(x, y)},
            {
                "data": {"values": seen},
                "mark": {"type": "point", "filled": True},
                "encoding": _xy(x, y) | {"color": colour(lines)},
            },
        ]
    )
    keys = [Key.of(line, "dot") for line in lines]
    return Chart(spec, "Predicted and measured", "Held-out medians lie along the diagonal.", keys, "Held-out points only.")


Part = tuple[str, int, int]  # its name, units, units of the other lane


def _parts(profile: Profile, kind: str) -> list[Part]:
    pairs = sorted({(p.units, p.beside) for p in profile.points if p.kind == kind}, key=lambda part: (part[1] > 0, -part[0]))
    pairs = pairs[:: -(-len(pairs) // len(SERIES))]
    return [(f"{units} units" + (f" beside {beside}" if beside else ""), units, beside) for units, beside in pairs]


def _curves(title: str, x_title: str, parts: Sequence[Part], rows: list[Spec], seen: list[Spec], note: str = "") -> Chart:
    lines = [Line(name, tint) for (name, *_), tint in zip(parts, SERIES[: len(parts)], strict=True)]
    values = [row["x"] for row in (*rows, *seen)]
    x = {"type": "quantitative", "scale": log_scale((min(values), max(values))), "title": x_title}
    y = {"type": "quantitative", "title": "ms", "scale": {"zero": True}}
    encoding = _xy(x, y) | {"color": colour(lines)}
    spread = encoding | {"y": {"field": "low", **y}, "y2": {"field": "high"}}
    spec = chart(
        [
            {"data": {"values": rounded(rows)}, "mark": {"type": "line", "clip": True}, "encoding": encoding},
            {"data": {"values": rounded(seen)}, "mark": {"type": "rule", "opacity": 0.5}, "encoding": spread},
            {"data": {"values": rounded(seen)}, "mark": {"type": "point", "filled": True}, "encoding": encoding},
        ]
    )
    return Chart(spec, title, f"{title}: measured marks and the model's lines.", [Key.of(line) for line in lines], note)


def _mark(series: str, x: float, point: MeasuredPoint, layers: int = 1) -> Spec:
    low, middle, high, _ = (1e3 * seconds / layers for seconds in point.percentiles_s)
    return {"series": series, "x": x, "y": middle, "low": low, "high": high}


def _xy(x: dict[str, Any], y: dict[str, Any]) -> Spec:
    return {"x": {"field": "x", **x}, "y": {"field": "y", **y}}


def _grid(low: int, high: int) -> list[int]:
    """Whole numbers from `low` to `high`, about evenly on a log scale."""
    return sorted({round(low * (high / low) ** (i / (STEPS - 1))) for i in range(STEPS)})


def _qualities(profile: Profile) -> Table:
    rows = [
        Row([q.part, str(q.points), str(q.samples), f"{q.median_error:.1%}", f"{q.p90_error:.1%}", f"{q.coverage:.1%}"])
        for q in profile.qualities
    ]
    return Table(
        "Held-out error and coverage", ["step", "points", "times", "median error", "p90 error", "under the bound"], rows
    )


def _probe(probe: Probe) -> Table:
    rows = [
        Row([str(units), f"{moved / 1e9:.1f}", f"{computed / 1e9:.0f}"])
        for units, moved, computed in zip(probe.units, probe.bytes_per_s, probe.flop_per_s, strict=True)
    ]
    return Table("Stream triad and matrix product", ["units", "GB/s", "GFLOP/s"], rows)
