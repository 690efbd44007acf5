"""What `pdmux tune` tells: its table on the terminal, its page, and the same as data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdmux_ray.metrics.goodput import DEFINITION, Bound
from pdmux_ray.report import figures
from pdmux_ray.report.marks import SERIES, Line
from pdmux_ray.report.page import Card, Cards, Chart, Folded, Key, Notes, Row, Section, Table, render
from pdmux_ray.report.tune_charts import RatioPoint, goodput_over_ratio
from pdmux_ray.tune.candidates import Kind
from pdmux_ray.tune.search import Outcome, Sensitivity
from pdmux_ray.tune.standing import Standing, ranked

COLUMNS = (
    *("topology", "TP", "mode", "route", "goodput per GPU", "95 % interval", "binds"),
    *("prefill", "decode", "KV", "link", "TTFT p99 ms", "ITL p99 ms"),
)
LEFT = (0, 2, 3, 4, 5, 6)  # columns of words
LEGEND = (
    "P: instances that only prefill, M: that do both, D: that only decode. TP: GPUs of an instance. Goodput: requests a second "
    "and GPU. Binds: what most requests missed for at the first rate that did not hold. The shares say how busy each was there "
    "(KV: the pool at its fullest). Latencies are of the last rate that held. <: left as soon as another one was surely better."
)


def rows(standings: Sequence[Standing]) -> list[list[str]]:
    """Texts, a row each."""
    return [_row(standing) for standing in standings]


def _row(standing: Standing) -> list[str]:
    candidate, at, held = standing.candidate, standing.failed or standing.found[-1], standing.held
    topology, uses = candidate.topology, at.uses
    goodput, interval = _goodput(standing)
    return [
        str(topology),
        str(topology.tp),
        candidate.mode.value if topology.mux else figures.NONE,
        str(candidate.route) if topology.prefill else figures.NONE,
        goodput,
        interval,
        standing.binds.value if standing.binds else figures.NONE,
        *(_percent(share) for share in (uses.prefill, uses.decode, uses.kv)),
        _percent(uses.link) if topology.prefill else figures.NONE,
        figures.ms(held.summary.ttft_s.p99) if held else figures.NONE,
        figures.ms(held.summary.itl_s.p99) if held else figures.NONE,
    ]


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def _goodput(standing: Standing) -> tuple[str, str]:
    if standing.beaten or standing.held is None:
        return f"< {figures.significant(standing.upper_rps)}", figures.NONE
    low, high = standing.goodput.ci
    prefix = "at least " if standing.goodput.bound is Bound.AT_LEAST else ""
    return prefix + figures.significant(standing.goodput.rps), f"{figures.significant(low)} to {figures.significant(high)}"


def sensitivity_rows(found: Sequence[Sensitivity], winner: Standing) -> list[list[str]]:
    """Assumption, value, who wins, its goodput, whether that is another one."""
    table = []
    for each in found:
        best = each.winner
        same = best.candidate == winner.candidate
        verdict = (
            "" if same else "another one" if best.candidate.topology.kind is winner.candidate.topology.kind else "another kind"
        )
        table.append([each.variant.name, each.variant.value, str(best.candidate), _goodput(best)[0], verdict or "the same"])
    return table


def sensitivity_line(found: Sequence[Sensitivity], winner: Standing) -> str:
    """A sentence."""
    others = [each for each in found if each.winner.candidate.topology.kind is not winner.candidate.topology.kind]
    if not others:
        return f"With each of {len(found)} assumptions changed, {winner.candidate.topology.kind.value} stays the best kind."
    changed = ", ".join(f"{each.variant.name} {each.variant.value}" for each in others)
    return f"The kind that wins depends on what is assumed: with {changed} it is another one."


SENSITIVITY_COLUMNS = ("assumption", "value", "winner", "goodput per GPU", "")


def page(title: str, outcome: Outcome, lines: Sequence[str], notes: Sequence[str], lead: str) -> str:
    """HTML, one file without network. `lines`: what is concluded."""
    winner = outcome.winner
    sections = [
        Section("", [_cards(winner), Notes(lines)]),
        Section(
            "Confirmed",
            [
                _table("The best, and the best of each kind, run again, in the order of the search", outcome.confirmed),
                Notes([LEGEND]),
            ],
        ),
        Section("Ratio", [_chart(outcome)]),
        Section(
            "Sensitivity",
            [
                Notes([sensitivity_line(outcome.sensitivities, winner)]),
                Table(
                    "Each assumption at half and at twice its value",
                    SENSITIVITY_COLUMNS,
                    [Row(cells) for cells in sensitivity_rows(outcome.sensitivities, winner)],
                    style="words",
                ),
            ]
            if outcome.sensitivities
            else [],
        ),
        Section("All candidates", [Folded(f"{len(outcome.standings)} candidates", [_table("Search", outcome.standings)])]),
        Section("How", [Notes([*notes, DEFINITION])]),
    ]
    return render(figures.printable(title), sections, lead)


def _cards(winner: Standing) -> Cards:
    goodput, interval = _goodput(winner)
    card = Card(str(winner.candidate), goodput, "requests/s per GPU", [f"95 % interval {interval}"])
    return Cards([card])


def _table(caption: str, standings: Sequence[Standing]) -> Table:
    return Table(caption, COLUMNS, [Row(cells) for cells in rows(standings)], style="words")


def _chart(outcome: Outcome) -> Chart:
    points = ratio_points(outcome.standings)
    lines = [Line(name, colour) for name, colour in zip(dict.fromkeys(point.series for point in points), SERIES, strict=False)]
    best = max(points, key=lambda point: point.rps)
    fallback = Table(
        "Goodput over the ratio",
        ("series", "only prefill", "candidate", "goodput per GPU"),
        [
            Row([point.series, figures.percent(point.share), point.name, f"{'' if point.ci else '< '}{point.rps:.3g}"])
            for point in points
        ],
        style="words",
    )
    words = (
        "The best candidate at each ratio, of each number of GPUs an instance, on the requests of the search (the table above "
        f"is of others); the highest: {best.name}."
    )
    note = "Triangles: no rate that was tried held; goodput is below them."
    spec = goodput_over_ratio(lines, points)
    return Chart(spec, "Goodput over the ratio", words, [Key.of(line) for line in lines], note, fallback)


def ratio_points(standings: Sequence[Standing]) -> list[RatioPoint]:
    """The best of each kind and TP at each share of GPUs that only prefill, by share; aggregated ones begin both lines."""
    found: dict[tuple[str, float], RatioPoint] = {}
    for standing in ranked(standings):
        topology = standing.candidate.topology
        names = [f"{kind.value}, TP {topology.tp}" for kind in (Kind.MIXED, Kind.DISAGGREGATED)]
        if topology.prefill:
            names = [f"{topology.kind.value}, TP {topology.tp}"]
        known = standing.held is not None
        rps, ci = (standing.goodput.rps, standing.goodput.ci) if known else (standing.upper_rps, None)
        for name in names:
            point = RatioPoint(name, topology.prefill_share, rps, ci, str(standing.candidate))
            found.setdefault((name, topology.prefill_share), point)
    shown = {name for name, share in found if share}
    lone = {key: point for key, point in found.items() if key[0] in shown or key[0].startswith(Kind.MIXED.value)}
    return [lone[key] for key in sorted(lone)]


def document(outcome: Outcome, conditions: dict[str, str], lines: Sequence[str], notes: Sequence[str]) -> dict[str, Any]:
    """Of JSON."""
    return {
        "conclusion": list(lines),
        "conditions": conditions,
        "confirmed": [_data(standing) for standing in outcome.confirmed],
        "candidates": [_data(standing) for standing in outcome.standings],
        "sensitivity": [
            {
                "assumption": each.variant.name,
                "value": each.variant.value,
                "winner": str(each.winner.candidate),
                "candidates": [_data(standing) for standing in each.standings],
            }
            for each in outcome.sensitivities
        ],
        "runs": outcome.runs,
        "notes": list(notes),
    }


def _data(standing: Standing) -> dict[str, Any]:
    topology, goodput = standing.candidate.topology, standing.goodput
    return {
        "candidate": str(standing.candidate),
        "kind": topology.kind.value,
        "tp": topology.tp,
        "prefill": topology.prefill,
        "mux": topology.mux,
        "decode": topology.decode,
        "mode": standing.candidate.mode.value,
        "route": str(standing.candidate.route),
        "goodput_rps_per_gpu": goodput.rps,
        "goodput_ci": list(goodput.ci),
        "goodput_bound": goodput.bound.value,
        "beaten": standing.beaten,
        "binds": standing.binds.value if standing.binds else None,
        "rates": [
            {
                "rate_rps": each.point.rate_rps,
                "requests": len(each.point.good),
                "good": each.point.good_fraction,
                "queue_grows": each.falls_behind,
            }
            for each in standing.found
        ],
    }
