"""A real Prometheus scrapes a real application under load: what dashboards and rules then say, held against the load generator.

The load lies within one window of every rate, so that a rate times its window is everything that was counted.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import re
import subprocess
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pdmux_ray import cli
from pdmux_ray.bench import prometheus_server
from pdmux_ray.bench.load.client import Dialect, Target
from pdmux_ray.bench.load.generator import Options, open_loop, run
from pdmux_ray.config import (
    AppConfig,
    FakeConfig,
    GatewayConfig,
    MultiplexConfig,
    SloConfig,
    TopologyConfig,
)
from pdmux_ray.config_placement import PlacementConfig
from pdmux_ray.metrics.catalog import CATALOG
from pdmux_ray.metrics.dashboards import DASHBOARDS
from pdmux_ray.metrics.dashboards.answers import Span, choices
from pdmux_ray.metrics.dashboards.panel import Panel
from pdmux_ray.metrics.dashboards.variables import filled
from pdmux_ray.metrics.exporter import Figures, registry_of
from pdmux_ray.metrics.goodput import Slo
from pdmux_ray.metrics.lifeline import Lifeline, quantile
from pdmux_ray.metrics.metric import Component
from pdmux_ray.metrics.prometheus import Prometheus
from pdmux_ray.metrics.rules import rules
from pdmux_ray.metrics.summary import RunSummary, summarize_run
from pdmux_ray.serve.scrape_port import ScrapePort
from pdmux_ray.workload.requests import Ask, PlannedRequest
from tests.ray.conftest import fake_engine
from tests.ray.test_disaggregated import Pair
from tests.ray.test_operation import wait_until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed (extra nixl)"),
]

# What requests are judged by. A first token comes after 1.2 or 4.8 s: neither is near it, and the ways between client, gateway
# and instance, which either side measures otherwise, are short beside it also on a machine that is busy with other things.
TTFT_S, ITL_S = 2.8, 2.0
LONG, SHORT, ANSWER = 160, 40, 24  # tokens
REQUESTS, GAP_S = 15, 2.6  # so far apart that few wait for each other
WINDOW_S = 60.0  # of rates; a few seconds longer than the load takes
SCRAPE_S = 0.5
LAST = 3  # scrapes of each target that must have succeeded before Prometheus is asked: two of them before the rules looked
CLOSE = 0.02
TARGETS = 5  # gateway, two instances, the controller, and what `profiled` makes up
OF_A_PROFILE = ["Times above their bound", "Correction of the profile", "Kinds of work that drift"]
RULES = [rule for group in rules()["groups"] for rule in group["rules"]]
# What a reader chooses of each dashboard: one instance is that which decodes, and some of the prompts' prefills are its own.
GIVEN = {name: {"app": "metered"} | ({"role": "mux"} if name == "instance" else {}) for name in DASHBOARDS}
CONFIG = AppConfig(
    served_model_name="demo",
    topology=TopologyConfig(prefill=1, mux=1),
    engine=fake_engine(
        fake=FakeConfig(step_s=0.05, prefill_s_per_token=0.03),
        mode="auto",
        multiplex=MultiplexConfig(ttft_s=TTFT_S, itl_s=0.3),
    ),
    gateway=GatewayConfig(discovery_period_s=0.5, slo={"default": SloConfig(ttft_s=TTFT_S, itl_s=ITL_S)}),
    placement=PlacementConfig(enabled=True, dry_run=True),
)


@dataclass(frozen=True)
class Measured:
    """What both have seen of one load."""

    app: Pair
    prometheus: Prometheus
    at_s: float  # when Prometheus is asked
    summary: RunSummary
    lifelines: list[Lifeline]

    @property
    def span(self) -> Span:
        return Span(self.at_s - WINDOW_S, self.at_s, WINDOW_S)

    def ask(self, expr: str) -> float:
        """The one value that it has."""
        (series,) = self.prometheus.query(expr, self.at_s)
        return series.value

    def counted(self, expr: str) -> float:
        """Of a rate over WINDOW_S."""
        return self.ask(f"sum({expr})") * WINDOW_S


@pytest.fixture(scope="module")
def measured(served: str) -> Iterator[Measured]:
    from ray import serve

    from pdmux_ray.serve.app import build_app

    serve.run(build_app(CONFIG), name="metered", route_prefix="/metered")
    app = Pair(f"{served}/metered", "metered")
    try:
        with profiled() as others, prometheus_server.scraping(app.url, every_s=SCRAPE_S, others=others) as running:
            prometheus = Prometheus(running.url)
            wait_until(lambda: {each["role"] for each in app.instances() if not each["trouble"]} == {"prefill", "mux"}, 60)
            wait_until(lambda: len(prometheus.query("up == 1")) == TARGETS, 60)
            begin_s = time.time()
            summary, lifelines = _offer(app)
            wait_until(lambda: not app.busy(), 30)
            yield Measured(app, prometheus, _moment(prometheus, begin_s, time.time()), summary, lifelines)
    finally:
        serve.delete("metered")


def _moment(prometheus: Prometheus, begin_s: float, idle_s: float) -> float:
    """At which Prometheus is to be asked: it has found everybody just before, since all was done, and before all began."""
    while True:
        at_s = time.time()
        assert at_s < begin_s + WINDOW_S, "the load, and the wait for scrapes after it, took longer than a window of rates"
        time.sleep(2 * SCRAPE_S)  # what is scraped by then is there by now
        scrapes = [[at for at, up in series.points if up == 1] for series in prometheus.query(f"up[{WINDOW_S:g}s]", at_s)]
        first_s, since = [each[0] for each in scrapes if each], at_s - LAST * SCRAPE_S
        found = [sum(at > since for at in each) for each in scrapes]
        if since > idle_s and len(first_s) == TARGETS and max(first_s) < begin_s and min(found) >= LAST:
            return at_s


@contextlib.contextmanager
def profiled() -> Iterator[Mapping[str, Mapping[str, str]]]:
    """What only instances with a measured profile export, made up: the address, with its labels."""

    def figures() -> Figures:
        by_kind = {"decode": 1.0, "prefill": 1.1, "mixed": 1.2}
        gauges: Figures = {"pdmux_drifting_cells": 0.0, "pdmux_correction_factor": 1.2}
        factors: Figures = {"pdmux_prediction_factor": by_kind, "pdmux_bound_factor": by_kind}
        return {
            **gauges,
            **factors,
            "pdmux_predicted_times_total": time.time(),
            "pdmux_exceeded_bounds_total": time.time() / 100,
        }

    port = ScrapePort(registry_of(Component.INSTANCE, figures), "127.0.0.1")
    yield {port.address: {"app": "profiled", "model": "demo", "component": "instance", "instance": "profiled"}}
    port.close()


def _offer(app: Pair) -> tuple[RunSummary, list[Lifeline]]:
    """One request after the other begins; every fourth one has a long prompt."""
    lengths = [LONG if n % 4 == 0 else SHORT for n in range(REQUESTS)]
    plan = [
        PlannedRequest(n, n * GAP_S, Ask(tuple(range(1000 * n, 1000 * n + tokens)), ANSWER)) for n, tokens in enumerate(lengths)
    ]
    target = Target(app.url, "demo", dialect=Dialect())  # known, so that nothing is asked but what is counted
    load = run(open_loop(target, plan, Options(), lambda sent, done, planned: None))
    summary = summarize_run("metered", 1 / GAP_S, load.lifelines, Slo(TTFT_S, ITL_S))
    assert summary.errors == 0
    return summary, list(load.lifelines)


def test_promtool_finds_nothing_wrong_with_the_rules() -> None:
    done = subprocess.run(
        [prometheus_server.tool("promtool"), "check", "rules", str(prometheus_server.RULES)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "SUCCESS" in done.stdout


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_query_of_every_panel_returns_figures(measured: Measured, name: str) -> None:
    dashboard = DASHBOARDS[name]
    chosen = choices(measured.prometheus, dashboard, GIVEN[name], measured.span)
    chosen = {**chosen, "app": "metered|profiled", "instance": f"{chosen['instance']}|profiled"}
    empty = [
        (panel.title, query.expr)
        for panel in dashboard.panels
        for query in panel.queries
        if not _figures(measured, filled(query.expr, chosen | measured.span.values))
    ]
    assert empty == []


def _figures(measured: Measured, expr: str) -> list[float]:
    values = [series.value for series in measured.prometheus.query(expr, measured.at_s)]
    return [value for value in values if math.isfinite(value)]


@pytest.mark.parametrize("record", [rule["record"] for rule in RULES if "record" in rule])
def test_every_recording_rule_returns_figures(measured: Measured, record: str) -> None:
    assert _figures(measured, record) != []


@pytest.mark.parametrize("alert", [rule for rule in RULES if "alert" in rule], ids=lambda rule: rule["alert"])
def test_every_alert_can_be_evaluated(measured: Measured, alert: dict[str, Any]) -> None:
    measured.prometheus.query(alert["expr"], measured.at_s)  # one that cannot raises
    assert {"summary", "description", "runbook"} <= alert["annotations"].keys()


def test_counts_are_those_of_the_load_generator(measured: Measured) -> None:
    offered, of = measured.summary, '{app="metered"}'
    assert {
        "requests": measured.counted(f"app:pdmux_requests:rate1m{of}"),
        "prompt tokens": measured.counted(f"app:pdmux_prompt_tokens:rate1m{of}"),
        "output tokens": measured.counted(f"app:pdmux_generated_tokens:rate1m{of}"),
        "good requests": measured.counted('rate(pdmux_slo_requests_total{app="metered", verdict="good"}[1m])'),
        "late requests": measured.counted('rate(pdmux_slo_requests_total{app="metered", verdict="ttft"}[1m])'),
        "gaps": measured.counted('rate(pdmux_inter_token_seconds_count{app="metered"}[1m])'),
    } == pytest.approx(
        {
            "requests": offered.requests,
            "prompt tokens": offered.prompt_tokens,
            "output tokens": offered.output_tokens,
            "good requests": offered.verdicts["good"],
            "late requests": offered.verdicts["ttft"],
            "gaps": sum(len(lifeline.gaps_s) for lifeline in measured.lifelines),
        },
        rel=CLOSE,
    )
    assert 0 < offered.verdicts["ttft"] < offered.requests  # else the two lines above say little


def test_attainment_is_that_of_the_load_generator(measured: Measured) -> None:
    for window in ("5m", "1h"):
        found = measured.ask(f'app_tier:pdmux_slo_attainment:ratio{window}{{app="metered", tier="default"}}')
        assert found == pytest.approx(measured.summary.good_fraction, rel=CLOSE)


def test_mean_latencies_are_those_of_the_load_generator(measured: Measured) -> None:
    offered, of = measured.summary, '{app="metered"}'
    found = {
        name: measured.ask(f"sum(rate({name}_sum{of}[1m])) / sum(rate({name}_count{of}[1m]))")
        for name in (
            "pdmux_time_to_first_token_seconds",
            "pdmux_inter_token_seconds",
            "pdmux_time_per_output_token_seconds",
            "pdmux_request_seconds",
        )
    }
    expected = (offered.ttft_s.mean, offered.itl_s.mean, offered.tpot_s.mean, offered.e2e_s.mean)
    assert list(found.values()) == pytest.approx(expected, rel=CLOSE)


@pytest.mark.parametrize("q", [0.5, 0.99])
def test_quantiles_are_within_a_bucket_of_the_load_generators(measured: Measured, q: float) -> None:
    """The panels' queries and the rules'."""
    gaps_s = sorted(gap for lifeline in measured.lifelines for gap in lifeline.gaps_s)
    ttfts_s, e2es_s, tpots_s = (
        sorted(value for lifeline in measured.lifelines if (value := getattr(lifeline, name)) is not None)
        for name in ("ttft_s", "e2e_s", "tpot_s")
    )
    p = f"p{q * 100:g}_5m"
    for expr, name, values in (
        (f"app:pdmux_ttft_seconds:{p}", "pdmux_time_to_first_token_seconds", ttfts_s),
        (f"app:pdmux_itl_seconds:{p}", "pdmux_inter_token_seconds", gaps_s),
        (_quantile(q, "pdmux_time_per_output_token_seconds"), "pdmux_time_per_output_token_seconds", tpots_s),
        (_quantile(q, "pdmux_request_seconds"), "pdmux_request_seconds", e2es_s),
    ):
        bounds = CATALOG[name].buckets
        found, exact = measured.ask(expr), quantile(values, q)
        assert abs(bisect_left(bounds, found) - bisect_left(bounds, exact)) <= 1, (expr, found, exact)


def _quantile(q: float, name: str) -> str:
    return f"histogram_quantile({q:g}, sum by (le) (rate({name}_bucket[1m])))"


def test_the_stages_of_a_first_token_add_up_to_it(measured: Measured) -> None:
    stages = _panel("slo_overview", "Where the time to the first token goes").queries[0].expr
    chosen = choices(measured.prometheus, DASHBOARDS["slo_overview"], {}, measured.span)
    found = measured.prometheus.query(filled(stages, chosen | measured.span.values), measured.at_s)
    assert {series.labels["stage"] for series in found} == {"gateway", "queue", "transfer", "prefill", "delivery"}
    mean_s = measured.summary.ttft_s.mean
    assert mean_s is not None
    assert sum(series.value for series in found) == pytest.approx(mean_s, rel=CLOSE)


def _panel(dashboard: str, title: str) -> Panel:
    return next(panel for panel in DASHBOARDS[dashboard].panels if panel.title == title)


def test_kv_that_went_between_the_instances_is_counted_alike_at_both_ends(measured: Measured) -> None:
    landed = measured.counted('rate(pdmux_fetches_total{app="metered", reason="landed"}[1m])')
    assert landed == pytest.approx(measured.counted('rate(pdmux_exports_total{app="metered", reason="sent"}[1m])'), rel=CLOSE)
    received, used = (
        measured.counted(f'rate(pdmux_kv_{name}_tokens_total{{app="metered"}}[1m])') for name in ("received", "used")
    )
    assert received == pytest.approx(used, rel=CLOSE)
    assert 1 <= landed <= measured.summary.requests


@pytest.mark.parametrize("name", DASHBOARDS)
@pytest.mark.parametrize("form", ["html", "png"])
def test_every_dashboard_is_drawn_without_grafana(
    measured: Measured, tmp_path: Path, name: str, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"{name}.{form}"
    given = [word for variable, value in GIVEN[name].items() for word in (f"--{variable}", value)]
    options = ["--render", measured.prometheus.url, "--dashboard", name, "--seconds", "300", *given, "--out", str(path)]
    assert cli.main(["dashboards", *options]) == 0
    empty = capsys.readouterr().out.strip().partition("; without data: ")[2]
    assert empty.split(", ") == (OF_A_PROFILE if name == "instance" else [""])
    drawn = path.read_bytes()
    if form == "png":
        assert drawn.startswith(b"\x89PNG")
    else:
        titles = re.findall(r"<h3>(.*?)</h3>", drawn.decode())
        assert {panel.title for panel in DASHBOARDS[name].panels} <= set(titles)
