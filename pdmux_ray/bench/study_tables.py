"""The tables of a study, in Markdown: goodput by shape and server, latencies at one rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdmux_ray.bench.load.session import Session
from pdmux_ray.bench.study import Shape
from pdmux_ray.metrics.summary import RunSummary, Summary, summarize_run
from pdmux_ray.report import figures


def goodputs(shapes: Sequence[Shape], names: Sequence[str]) -> list[str]:
    """A row for each shape, a column for each server."""
    lines = ["| workload | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for shape in shapes:
        sessions = [shape.sessions.get(name) for name in names]
        cells = [_goodput(session.summary()) if session and session.records else figures.NONE for session in sessions]
        lines.append(f"| {shape.workload.name} | " + " | ".join(cells) + " |")
    return lines


def latencies(sessions: Sequence[Session], rate: float, what: Mapping[str, str]) -> list[str]:
    """Milliseconds, at `rate`; the goodput of all rates. `what`: words for the sessions' names."""
    lines = [
        f"| at {figures.rate(rate)} requests/s | TTFT p50, ms | p99 | ITL p50, ms | p99 | largest gap, ms | good | "
        "goodput, requests/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for session in sessions:
        run = pooled(session, rate)
        if run is None:
            continue
        times = (run.ttft_s.p50, run.ttft_s.p99, run.itl_s.p50, run.itl_s.p99, run.itl_s.max)
        cells = [what.get(session.name, session.name), *map(figures.ms, times), figures.percent(run.good_fraction)]
        lines.append(f"| {' | '.join([*cells, _goodput(session.summary())])} |")
    return lines


def pooled(session: Session, rate: float) -> RunSummary | None:
    """All valid rounds at a rate as one run; None without any."""
    lifelines = [one for record in session.records if record.rate == rate and not record.invalid for one in record.lifelines]
    return summarize_run(session.name, rate, lifelines, session.terms.slo) if lifelines else None


def _goodput(summary: Summary) -> str:
    low, high = summary.goodput_ci
    return f"{figures.goodput(summary)} ({figures.significant(low)} to {figures.significant(high)})"
