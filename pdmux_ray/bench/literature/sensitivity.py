"""How far the comparison of PD multiplexing with its rivals hangs on what is assumed of a part of a GPU, and on the chunk.

Each assumption is halved and doubled, the others staying as they are. Chunks and 1:1 have all of each GPU for whatever they do,
of which nothing is assumed: they are simulated once. The source does not say how long its chunks are. `overlap` and `switch_s`
are left out: lanes of a split share no SM, and a switch takes a thousandth of a step's objective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pdmux_ray.bench.literature.fleets import Fleet, StepTimes, Tell, limit
from pdmux_ray.bench.literature.multiplexing import BY_ARRIVAL, PUBLISHED_70B, WORKS_70B, Server, over, server_70b, slo
from pdmux_ray.bench.literature.rows import Comparison, Row
from pdmux_ray.costs.sm_share import scaled
from pdmux_ray.metrics.goodput import Goodput
from pdmux_ray.report import figures

VARIED = ("read_loss", "decode_beside", "prefill_beside", "compute_exponent", "guard")
CHUNK, OTHER_CHUNKS = 512, (256, 1024, 2048)  # tokens
WORK = WORKS_70B[0]
ORDERS: Sequence[tuple[str, Callable[[Server], Fleet]]] = (
    ("", Server.multiplexed),
    (BY_ARRIVAL, Server.multiplexed_by_arrival),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One set of assumptions."""

    name: str
    steps: StepTimes


def cases(steps: StepTimes) -> list[Case]:
    """As assumed, then each one of `VARIED` halved and doubled."""
    found = [Case("as assumed", steps)]
    for name in VARIED:
        for factor in (0.5, 2.0):
            value = scaled(name, getattr(steps.assume, name), factor)
            found.append(Case(f"{name} {value:.3g}", replace(steps, assume=replace(steps.assume, **{name: value}))))
    return found


def compare(steps: StepTimes, tell: Tell) -> Comparison:
    server = server_70b(steps)
    load, objective = WORK.load(), [slo(server.itl_s)]

    def most(fleet: Fleet, case: str) -> Goodput:
        return limit(fleet, load, objective, lambda text: tell(f"{case}: {text}"))

    rivals = [server.chunked(CHUNK), server.halves()]
    carried, usual = [most(rival, "rivals") for rival in rivals], cases(steps)[0]
    muxed = {
        (case, order): most(multiplexed(server_70b(case.steps)), case.name)
        for case in cases(steps)
        for order, multiplexed in ORDERS
    }
    factors = {key: [over(found, rival) for rival in carried] for key, found in muxed.items()}
    against = f"over {rivals[0].name}, over {rivals[1].name}"
    rows = [row(f"{case.name}{order}: {against}", found) for (case, order), found in factors.items()]
    for other in map(server.chunked, OTHER_CHUNKS):
        found = most(other, "rivals")
        for order, _ in ORDERS:
            what = f"{usual.name}{order}: over {other.name}"
            rows.append(Row(what, PUBLISHED_70B[WORK.shape][0], over(muxed[usual, order], found), "×"))
    spans = [span(rivals, [found for (_, each), found in factors.items() if each == order]) for order, _ in ORDERS]
    return Comparison(
        f"PD multiplexing on 8 × A100, each assumption halved and doubled: {WORK.shape}",
        "as of the comparison on 8 × A100.",
        rows,
        [
            f"All else as there. `guard`: its part above 1. The rivals use whole GPUs, of which none of this is assumed: "
            f"{' and '.join(figures.significant(each.rps) for each in carried)} requests/s.",
            str(steps),
        ],
        f"as there. Lowest and highest factors of what is assumed: {'; in order of arrival '.join(spans)}.",
    )


def row(what: str, factors: Sequence[float | None]) -> Row:
    published = " and ".join(figures.significant(each) for each in PUBLISHED_70B[WORK.shape])
    return Row(what, None, None, "×", published, " and ".join(figures.significant(each) for each in factors))


def span(rivals: Sequence[Fleet], factors: Sequence[Sequence[float | None]]) -> str:
    """The lowest and the highest over each rival, of those that could be measured."""
    said = []
    for rival, column in zip(rivals, zip(*factors, strict=True), strict=True):
        known = [factor for factor in column if factor is not None]
        bounds = " to ".join(figures.significant(bound) for bound in (min(known), max(known))) if known else figures.NONE
        said.append(f"{bounds} over {rival.name}")
    return " and ".join(said)
