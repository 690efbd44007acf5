"""The charts of a load report, with their legends and notes."""

from __future__ import annotations

from collections.abc import Sequence

from pdmux_ray.metrics.goodput import Verdict
from pdmux_ray.report import charts, figures, series
from pdmux_ray.report.marks import RANKS, Line, log_domain, rank_colours
from pdmux_ray.report.page import Block, Chart, Folded, Grid, Key, Row, Table
from pdmux_ray.report.ratios import shared_rates
from pdmux_ray.report.runs import Rate, TargetRuns, lines
from pdmux_ray.report.series import Window

CAUSES = {
    Verdict.ERROR: Line("error", "var(--error)"),
    Verdict.TRUNCATED: Line("truncated", "var(--truncated)"),
    Verdict.UNFINISHED: Line("unfinished", "var(--unfinished)"),
    Verdict.TTFT: Line("TTFT over the SLO", "var(--ttft)"),
    Verdict.ITL: Line("ITL over the SLO", "var(--itl)"),
}
MAX_CURVES = 8  # in one chart; more cannot be told apart
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)


def over_rate(targets: Sequence[TargetRuns]) -> list[Block]:
    """Attainment and good requests a second over the offered rate."""
    named = lines(targets)
    attainment = targets[0].summary.attainment
    points = [
        charts.AttainmentPoint(target.name, rate.rps, rate.good, target.ci(rate), rate.valid)
        for target in targets
        for rate in (*target.rates, *target.invalid_rates)
    ]
    goodputs = [_goodput_mark(target) for target in targets if target.goodput_known]
    legend = [Key.of(line) for line in named]
    if any(target.invalid_rates for target in targets):
        legend.append(Key("invalid run", "var(--text)", "cross"))
    table = _points_table(points)
    share = Chart(
        charts.attainment_over_rate(named, points, attainment, goodputs),
        "Attainment over rate",
        f"Share of good requests over offered requests per second, with {figures.percent(attainment)} marked. "
        + " ".join(f"{target.name}: goodput {figures.goodput(target.summary)}." for target in targets),
        legend,
        "Bars: 95 % intervals. The wide bar on the dashed line is the interval of the goodput.",
        table,
    )
    good = Chart(
        charts.good_over_rate(named, points),
        "Good requests over rate",
        "Good requests per second over offered requests per second.",
        legend,
        "On the dotted line every request is good.",
    )
    return [Grid([share, good])]


def _goodput_mark(target: TargetRuns) -> charts.GoodputMark:
    """On the axis of offered rates, which are those of all devices together."""
    devices, (low, high) = target.summary.devices, target.summary.goodput_ci
    return charts.GoodputMark(target.name, target.summary.goodput_rps * devices, (low * devices, high * devices))


def _points_table(points: Sequence[charts.AttainmentPoint]) -> Table:
    rows = [
        Row(
            [p.series, figures.rate(p.rate), figures.percent(p.good), " to ".join(map(figures.percent, p.ci or ()))],
            invalid=not p.valid,
        )
        for p in points
    ]
    return Table("Good requests over rate", ("target", "offered requests/s", "good", "95 % interval"), rows)


def misses(targets: Sequence[TargetRuns]) -> list[Block]:
    """Misses by cause, one chart per target on the same axes. Empty when no request missed."""
    rates = sorted({rate.rps for target in targets for rate in target.rates})
    top = max((1 - rate.good for target in targets for rate in target.rates), default=0.0)
    if not top:
        return []
    present = [cause for cause in CAUSES if any(rate.missed(cause) for target in targets for rate in target.rates)]
    found = []
    for target in targets:
        shares = [charts.MissShare(rate.rps, CAUSES[c].name, rate.missed(c)) for rate in target.rates for c in present]
        found.append(
            Chart(
                charts.misses([CAUSES[cause] for cause in present], shares, rates, min(1.0, top * 1.05)),
                target.name if len(targets) > 1 else "Misses by cause",
                f"Share of requests of {target.name} that missed, by cause, over offered requests per second.",
                [Key.of(CAUSES[cause], "box") for cause in present],
                fallback=_misses_table(target, present),
            )
        )
    return [Grid(found)]


def _misses_table(target: TargetRuns, causes: Sequence[Verdict]) -> Table:
    rows = [Row([figures.rate(rate.rps), *(figures.percent(rate.missed(cause)) for cause in causes)]) for rate in target.rates]
    return Table(f"Misses of {target.name}", ("offered requests/s", *(CAUSES[cause].name for cause in causes)), rows)


def latencies(targets: Sequence[TargetRuns]) -> list[Block]:
    """CDFs of TTFT and ITL. Several targets: a pair of charts for each rate that all were offered, a curve per target.
    One target, or no such rate: a pair for each target, a curve per rate. All charts of a measure have the same axis."""
    shared = shared_rates([target.summary for target in targets]) if len(targets) > 1 else []
    panels: list[_Panel] = []
    if shared:
        named = lines(targets)
        for rps in shared:
            rates = [rate for target in targets for rate in target.rates if rate.rps == rps]
            panels.append(_Panel(f"{figures.rate(rps)} requests/s", named, rates, targets[0]))
    else:
        for target in targets:
            rates = _spread(target.rates)
            colours = rank_colours(len(rates))
            curves = [Line(f"{figures.rate(r.rps)} requests/s", colour) for r, colour in zip(rates, colours, strict=True)]
            panels.append(_Panel(target.name if len(targets) > 1 else "", curves, rates, target))
    panels = [panel for panel in panels if any(len(values) for values in panel.ttft)]
    return [Grid(_pair(panel, panels)) for panel in panels]


class _Panel:
    """The samples of some rates, a curve for each. `target`: whose SLO is marked."""

    def __init__(self, title: str, named: Sequence[Line], rates: Sequence[Rate], target: TargetRuns) -> None:
        self.title, self.lines, self.target = title, named, target
        self.ttft = [series.ttfts(rate.lifelines) for rate in rates]
        self.itl = [series.gaps(rate.lifelines)[1] for rate in rates]
        self.ttft_limits_s = target.ttft_limits_s([lifeline for rate in rates for lifeline in rate.lifelines])
        itl_s = target.summary.slo.itl_s
        self.itl_limits_s = None if itl_s is None else (itl_s, itl_s)
        self.left_out = len(target.rates) - len(rates) if named and named[0].colour in RANKS else 0


def _pair(panel: _Panel, panels: Sequence[_Panel]) -> list[Chart]:
    found = []
    for measure, own, every, limits_s in (
        ("TTFT", panel.ttft, [p.ttft for p in panels], panel.ttft_limits_s),
        ("ITL", panel.itl, [p.itl for p in panels], panel.itl_limits_s),
    ):
        ends = [end for curves in every for values in curves for end in series.ends(values)]
        title = f"{measure} at {panel.title}" if panel.title.endswith("requests/s") else f"{measure} {panel.title}".strip()
        notes = [f"{panel.left_out} rates between these are left out."] if panel.left_out else []
        if limits_s and limits_s[0] < limits_s[1]:
            low, high = (figures.duration(float(f"{limit:.3g}")) for limit in limits_s)
            notes.append(f"The SLO goes from {low} for the shortest prompt to {high} for the longest.")
        if measure == "ITL" and limits_s:
            notes.append(f"The SLO is for the {panel.target.summary.slo.itl_statistic} of each request's own ITLs.")
        found.append(
            Chart(
                charts.cdf(panel.lines, [series.cdf(v) for v in own], measure, log_domain(ends, limits_s or ()), limits_s),
                title,
                f"Cumulative distribution of {measure} on a logarithmic axis.",
                [Key.of(line) for line in panel.lines],
                " ".join(notes),
                _quantiles_table(title, panel.lines, own),
            )
        )
    return found


def _quantiles_table(title: str, named: Sequence[Line], samples: Sequence[series.Floats]) -> Table:
    rows = [
        Row([line.name, *(figures.ms(float(q)) for q in series.quantiles(values, QUANTILES))])
        for line, values in zip(named, samples, strict=True)
        if len(values)
    ]
    columns = ("", *("max" if q == 1 else f"p{q * 100:g}" for q in QUANTILES))
    return Table(f"Quantiles of {title}, ms", columns, rows)


def _spread(rates: Sequence[Rate]) -> list[Rate]:
    """At most MAX_CURVES of them, the first and the last among them."""
    if len(rates) <= MAX_CURVES:
        return list(rates)
    return [rates[round(i * (len(rates) - 1) / (MAX_CURVES - 1))] for i in range(MAX_CURVES)]


def over_time(targets: Sequence[TargetRuns]) -> list[Block]:
    """ITL, and the units per lane where there are samples, over the time of each run: one run of each target in the open,
    the others folded."""
    runs = [run for target in targets for run in target.runs]
    ends = [end for _, lifelines in runs for end in series.ends(series.gaps(lifelines)[1])]
    if not ends:
        return []
    limit_s = targets[0].summary.slo.itl_s
    domain_s = log_domain(ends, () if limit_s is None else (limit_s,))
    blocks: list[Block] = []
    for target in targets:
        held = target.held.runs[0] if target.held else target.runs[0]
        drawn = {index: _run_charts(target, index, domain_s) for index in range(len(target.runs))}
        first = drawn.pop(next(index for index, run in enumerate(target.runs) if run is held))
        others = [chart for found in drawn.values() for chart in found]
        blocks += [Grid([chart]) for chart in first]  # one above the other: they share the time
        blocks += [Folded(f"The other runs of {target.name} ({len(target.runs) - 1})", [Grid(others)])] if others else []
    return blocks


def _run_charts(target: TargetRuns, index: int, domain_s: tuple[float, float]) -> list[Chart]:
    """Of the run with that place."""
    summary, lifelines = target.runs[index]
    if not lifelines:
        return []
    window = Window.of(lifelines)
    rain = series.arrivals(lifelines, window)
    where = f"{target.name}, {figures.rate(summary.rate)} requests/s{' (invalid)' if summary.invalid else ''}"
    prompts = Key("prompts as they arrive, height by tokens", "var(--rain)", "box")
    found = []
    if bins := series.gap_bins(*series.gaps(lifelines, window.begin_s), window.span_s):
        found.append(
            Chart(
                charts.itl_over_time(bins, rain, window.span_s, domain_s, target.summary.slo.itl_s),
                f"ITL over time: {where}",
                f"Median, 99th percentile and longest ITL over the run, logarithmic, with the arrivals of prompts. The longest "
                f"is {figures.duration(max(b.max_s for b in bins))}.",
                [Key("p50", "var(--series-0)"), Key("p99", "var(--series-1)"), Key("longest", "var(--muted)", "dot"), prompts],
                f"Each point covers {figures.duration(float(f'{bins[0].width_s:.2g}'))}.",
            )
        )
    if steps := series.units([sample for sample in target.units if sample.run == index], window):
        found.append(
            Chart(
                charts.units_over_time(steps, rain, window.span_s),
                f"Units per lane: {where}",
                "Compute units of the prefill lane and of the decode lane over the run, stacked, with the arrivals of prompts.",
                [*(Key.of(lane, "box") for lane in reversed(charts.LANES)), prompts],
            )
        )
    return found
