"""How much this machine's load generator can bear: many streams from a source that runs no model, on one core each.

    python -m pdmux_ray.bench.client_capacity [--streams 500] [--tokens-per-s 5000] [--seconds 10]

Two shapes of the same load: every stream on a schedule of its own, and all tokens of a step at once, as a server that batches
sends them (the harder one). "Late" is the client's time of a token minus the time when the source handed it to the kernel. Exit
status 1 when the client cannot: it lost tokens or requests, or a run of it would be invalid.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pdmux_ray.bench.load.client import Target
from pdmux_ray.bench.load.generator import Load, Options, open_loop, run
from pdmux_ray.bench.scripted_server import Record, Script, in_own_process
from pdmux_ray.metrics.lifeline import Ending, quantile
from pdmux_ray.workload.requests import Ask, PlannedRequest

RAMP_S = 2.0  # in which the streams begin
KEPT_UP = 0.99  # of the tokens asked for


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one shape."""

    shape: str
    asked_per_s: float
    received_per_s: float  # the streams' own rates, summed
    cpu_share: float  # of one core, while all streams were under way
    late_s: Sequence[float]  # of every token, ascending
    load: Load
    lost: int  # requests that are not complete

    @property
    def holds(self) -> bool:
        return self.load.invalid is None and not self.lost and self.received_per_s >= KEPT_UP * self.asked_per_s


class _Meter:
    """CPU time of this process while all streams are under way."""

    def __init__(self) -> None:
        self._begun: tuple[float, float] | None = None
        self._ended = (0.0, 0.0)

    def __call__(self, sent: int, done: int, planned: int) -> None:
        if sent == planned and done == 0:
            now = (time.perf_counter(), time.process_time())
            self._begun, self._ended = self._begun or now, now

    @property
    def cpu_share(self) -> float:
        begin, end = self._begun or self._ended, self._ended
        return (end[1] - begin[1]) / (end[0] - begin[0]) if end[0] > begin[0] else float("nan")


def measure(shape: str, streams: int, tokens_per_s: float, seconds: float, cores: Sequence[int]) -> Outcome:
    """`cores`: the client's and the source's."""
    gap_s = streams / tokens_per_s
    script = Script(step_s=gap_s) if shape == "steps" else Script(gap_s=gap_s)
    tokens = round((RAMP_S + seconds) / gap_s)
    plan = [PlannedRequest(n, n * RAMP_S / streams, Ask((n, 1, 2, 3), tokens)) for n in range(streams)]
    meter = _Meter()
    with in_own_process([script]) as source:
        os.sched_setaffinity(source.pid, cores[-1:])
        load = run(open_loop(Target(source.url, "source"), plan, Options(drain_s=60.0), meter))
        records = source.records()
    return _outcome(shape, tokens_per_s, load, meter, records)


def _outcome(shape: str, asked_per_s: float, load: Load, meter: _Meter, records: dict[int, Record]) -> Outcome:
    late_s = [
        came - sent
        for index, lifeline in enumerate(load.lifelines)
        for came, sent in zip(lifeline.token_s, records[index].token_s, strict=False)
    ]
    received_per_s = sum(1 / lifeline.tpot_s for lifeline in load.lifelines if lifeline.tpot_s)
    lost = sum(lifeline.ending is not Ending.COMPLETE for lifeline in load.lifelines)
    return Outcome(shape, asked_per_s, received_per_s, meter.cpu_share, sorted(late_s), load, lost)


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """One line for each shape, and what is wrong with it."""
    lines = [
        f"{'shape':8}{'asked/s':>9}{'came/s':>9}{'CPU':>7}{'late p50':>10}{'p99':>8}{'max ms':>8}"
        f"{'send p99 ms':>13}{'stall max ms':>14}{'stalled':>9}"
    ]
    for one in outcomes:
        late_ms = [quantile(one.late_s, q) * 1e3 if one.late_s else float("nan") for q in (0.5, 0.99, 1.0)]
        lines.append(
            f"{one.shape:8}{one.asked_per_s:9.0f}{one.received_per_s:9.0f}{one.cpu_share:7.0%}"
            f"{late_ms[0]:10.2f}{late_ms[1]:8.2f}{late_ms[2]:8.2f}{one.load.lateness_p99_s * 1e3:13.2f}"
            f"{one.load.longest_stall_s * 1e3:14.1f}{one.load.stalled_share:9.2%}   {'ok' if one.holds else 'CANNOT'}"
        )
        if one.lost:
            lines.append(f"  {one.lost} requests are not complete")
        if one.load.invalid:
            lines.append(f"  invalid: {one.load.invalid}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pdmux_ray.bench.client_capacity", description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--tokens-per-s", type=float, default=5000.0, help="of all streams together")
    parser.add_argument("--seconds", type=float, default=10.0, help="with all streams under way, for each shape")
    args = parser.parse_args(argv)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])
    print(f"{args.streams} streams; the client on core {cores[0]}, the source on core {cores[-1]}", file=sys.stderr)
    outcomes = [measure(shape, args.streams, args.tokens_per_s, args.seconds, cores) for shape in ("spread", "steps")]
    print("\n".join(table(outcomes)))
    print(f"event loop: {outcomes[0].load.loop}")
    return 0 if all(one.holds for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
