"""Every figure against a server that follows a script, in a process of its own.

The server notes when it wrote each chunk, on the clock that the client uses too, and the client's figures must be those of that
record to 1 ms or 1 %: the nominal times of a script would only say how exact this machine's timers are. For p99 and maximum of
a small sample the client's own longest stall, which it states, is allowed for: on a machine that others use it may be long.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace

import pytest

from pdmux_ray.bench.load.client import Target
from pdmux_ray.bench.load.generator import Load, Options, open_loop, run
from pdmux_ray.bench.scripted_server import Record, Script, Usage, in_own_process
from pdmux_ray.metrics.goodput import Slo, Verdict
from pdmux_ray.metrics.lifeline import Ending, Lifeline
from pdmux_ray.metrics.summary import RunSummary, Stats, summarize_run
from pdmux_ray.workload.requests import Ask, PlannedRequest
from tests.bench.repeated import repeated

pytestmark = pytest.mark.bench

SLO = Slo(ttft_s=0.3, itl_s=0.2)
TOKENS = 8
PROMPT_TOKENS = 3

GOOD = Script(first_s=0.1, gap_s=0.05)
SCRIPTS = {  # what each is worth under SLO; the margins are wide
    Verdict.GOOD: GOOD,
    Verdict.TTFT: replace(GOOD, head_s=0.3, first_s=0.4),
    Verdict.ITL: replace(GOOD, gap_s=0.4),
    Verdict.TRUNCATED: replace(GOOD, tokens=5),
    Verdict.ERROR: replace(GOOD, cut_after=4),
}


def offered(scripts: Sequence[Script], requests: int, gap_s: float, **options: float) -> tuple[Load, dict[int, Record]]:
    """Evenly spaced arrivals; request n gets script n modulo their count. A run that must not be used is made again."""
    plan = [PlannedRequest(n, n * gap_s, Ask((n,) + (7,) * (PROMPT_TOKENS - 1), TOKENS)) for n in range(requests)]

    def measure() -> tuple[Load, dict[int, Record]]:
        with in_own_process(scripts) as server:
            load = run(open_loop(Target(server.url, "m"), plan, Options(**options), lambda *_: None))
            return load, server.records()

    return repeated(measure, lambda measured: measured[0].invalid is None)


def truth(load: Load, records: dict[int, Record]) -> list[Lifeline]:
    """The lifelines as the server wrote them. Arrivals, asks and endings are not its to know."""
    return [replace(line, token_s=array("d", records[n].token_s)) for n, line in enumerate(load.lifelines)]


def summary(lifelines: Sequence[Lifeline]) -> RunSummary:
    return summarize_run("scripted", 1.0, lifelines, SLO)


def assert_same_figures(load: Load, records: dict[int, Record]) -> None:
    measured, true = summary(load.lifelines), summary(truth(load, records))
    for name in ("ttft_s", "itl_s", "tpot_s", "e2e_s"):
        for field in fields(Stats):
            value, expected = getattr(getattr(measured, name), field.name), getattr(getattr(true, name), field.name)
            tail_s = load.longest_stall_s if field.name in ("p99", "max") else 0.0
            assert value == pytest.approx(expected, rel=0.01, abs=0.001 + tail_s), f"{name} {field.name}"
    counts = ("requests", "errors", "verdicts", "good_fraction", "output_tokens", "prompt_tokens")
    assert {name: getattr(measured, name) for name in counts} == {name: getattr(true, name) for name in counts}
    assert measured.output_tokens_per_s == pytest.approx(true.output_tokens_per_s, rel=0.01)


@pytest.fixture(scope="module")
def mixed() -> tuple[Load, dict[int, Record]]:
    return offered(list(SCRIPTS.values()), requests=60, gap_s=0.025)


def test_every_figure_is_right(mixed: tuple[Load, dict[int, Record]]) -> None:
    load, records = mixed
    assert_same_figures(load, records)
    assert (load.invalid, load.interrupted, load.counting) == (None, False, "exact")


def test_goodput_errors_and_truncations_are_counted_to_the_request(mixed: tuple[Load, dict[int, Record]]) -> None:
    figures = summary(mixed[0].lifelines)
    assert {name: count for name, count in figures.verdicts.items() if count} == {verdict.value: 12 for verdict in SCRIPTS}
    assert (figures.good_fraction, figures.errors, figures.prompt_tokens) == (0.2, 24, 180)


def test_the_figures_are_those_of_the_script(mixed: tuple[Load, dict[int, Record]]) -> None:
    """Nominal times, with what a loaded machine may add: to the quickest of those that have the same script."""
    good = min(mixed[0].lifelines[:: len(SCRIPTS)], key=lambda line: line.e2e_s or math.inf)
    assert 0.1 <= (good.ttft_s or 0) < 0.15
    assert good.tpot_s == pytest.approx(0.05, abs=0.01)
    assert 0.1 + 7 * 0.05 <= (good.e2e_s or 0) < 0.1 + 7 * 0.05 + 0.1
    assert len(good.gaps_s) == 7


def test_a_stalled_server_cannot_hide_behind_late_sends() -> None:
    """Coordinated omission: a client that waits for answers before it sends would see one slow request, not twenty."""
    steady = Script(gap_s=0.01)
    load, records = offered([steady] * 15 + [replace(steady, stall_s=1.0)] + [steady] * 34, requests=50, gap_s=0.04)
    assert load.invalid is None
    assert load.lateness_p99_s < 0.01
    assert_same_figures(load, records)
    ends_s = records[15].chunk_s[0]
    waited = [line for line in load.lifelines[16:] if line.due_s < ends_s - 0.1]
    assert len(waited) >= 20
    assert all((line.ttft_s or 0) >= ends_s - line.due_s - 0.001 for line in waited)
    assert (load.lifelines[15].ttft_s or 0) >= 1.0
    assert max(gap for line in load.lifelines[10:15] for gap in line.gaps_s) > 0.9  # streams under way stood still too


@pytest.mark.parametrize(("usage", "counting"), [(Usage.PER_CHUNK, "exact"), (Usage.FINAL, "estimated")])
def test_tokens_that_share_a_chunk_are_one_arrival_and_all_counted(usage: Usage, counting: str) -> None:
    load, records = offered([replace(GOOD, tokens_per_chunk=3, usage=usage)], requests=20, gap_s=0.02)
    assert_same_figures(load, records)
    assert load.counting == counting
    for index, line in enumerate(load.lifelines):
        record = records[index]
        assert list(Counter(line.token_s.tolist()).values()) == record.chunk_tokens
        assert [len(line.token_s), len(line.gaps_s)] == [TOKENS, 2]
        spent_s = record.chunk_s[-1] - record.chunk_s[0]  # two gaps of 50 ms, or what a loaded machine made of them
        assert line.tpot_s == pytest.approx(spent_s / 7, abs=(0.001 + load.longest_stall_s) / 7)
        assert spent_s > 0.05


def test_a_count_that_the_server_states_otherwise_is_told() -> None:
    load, _ = offered([GOOD, replace(GOOD, extra_usage=2)], requests=4, gap_s=0.01)
    assert load.notes == ["2 requests: usage states 10 tokens, 8 came"]
    assert all(line.ending is Ending.COMPLETE for line in load.lifelines)
