"""Prometheus' recording rules and alerts, from the catalog's metrics. `pdmux dashboards` writes them to dashboards/rules.yaml.

A recording rule's name says over which labels it sums (app: also the model), what, and over how long. Each alert's runbook is a
heading of docs/operations.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

ATTAINMENT = 0.9  # the share of requests that are to be good; docs/goodput.md
# Alerts count in budgets, the share that may be missed: at 1 it is used up exactly.
FAST_BUDGETS, SLOW_BUDGETS = 3.0, 1.5
OLDEST_S = 30.0  # nobody waits for pages so long in a fleet that keeps up
UNUSED = 0.1  # of the KV that is fetched

PLACEMENT_WINDOW_S = 15.0  # of the rates that the placement goes by, whoever works them out

_APP = "app, model"
_MINUTE, _SOON = "1m", f"{PLACEMENT_WINDOW_S:g}s"


@dataclass(frozen=True, slots=True)
class Record:
    """A recording rule."""

    name: str
    expr: str

    def document(self) -> dict[str, Any]:
        return {"record": self.name, "expr": self.expr}


@dataclass(frozen=True, slots=True)
class Alert:
    """`severity`: page (somebody looks now) or ticket (on the next day)."""

    name: str
    expr: str
    after: str  # it must hold for so long
    severity: str
    summary: str
    description: str

    def document(self) -> dict[str, Any]:
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.after,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook": f"docs/operations.md#{self.name.lower()}",
            },
        }


def _rate(name: str, counter: str, window: str) -> Record:
    return Record(f"app:{name}:rate{window}", f"sum by ({_APP}) (rate({counter}[{window}]))")


def _quantile(name: str, histogram: str, q: float) -> Record:
    rates = f"sum by ({_APP}, le) (rate({histogram}_bucket[5m]))"
    return Record(f"app:{name}:p{q * 100:g}_5m", f"histogram_quantile({q:g}, {rates})")


def _attainment(window: str) -> Record:
    """No value while there are no requests."""
    by = f"sum by ({_APP}, tier)"
    good = f'{by} (rate(pdmux_slo_requests_total{{verdict="good"}}[{window}]))'
    return Record(
        f"app_tier:pdmux_slo_attainment:ratio{window}", f"{good} / ({by} (rate(pdmux_slo_requests_total[{window}])) > 0)"
    )


def _by_role(name: str, gauge: str) -> Record:
    return Record(
        f"role:{name}:sum",
        f"sum by ({_APP}, role) ({gauge} * on ({_APP}, instance) group_left (role) (pdmux_role == 1))",
    )


RECORDS = (
    _rate("pdmux_requests", "pdmux_requests_total", _MINUTE),
    _rate("pdmux_prompt_tokens", "pdmux_prompt_tokens_total", _MINUTE),
    _rate("pdmux_cached_prompt_tokens", "pdmux_cached_prompt_tokens_total", _MINUTE),
    _rate("pdmux_generated_tokens", "pdmux_generated_tokens_total", _MINUTE),
    Record(
        "app_tier:pdmux_good_requests:rate1m", f'sum by ({_APP}, tier) (rate(pdmux_slo_requests_total{{verdict="good"}}[1m]))'
    ),
    _attainment("5m"),
    _attainment("1h"),
    _quantile("pdmux_ttft_seconds", "pdmux_time_to_first_token_seconds", 0.5),
    _quantile("pdmux_ttft_seconds", "pdmux_time_to_first_token_seconds", 0.99),
    _quantile("pdmux_itl_seconds", "pdmux_inter_token_seconds", 0.5),
    _quantile("pdmux_itl_seconds", "pdmux_inter_token_seconds", 0.99),
)
# What the placement controller decides by: as instances compute it, and soon.
PLACEMENT = (
    _rate("pdmux_prefill_tokens", "pdmux_prefill_tokens_total", _SOON),
    _rate("pdmux_engine_generated_tokens", "pdmux_engine_generated_tokens_total", _SOON),
    _rate("pdmux_engine_finished", "pdmux_engine_finished_total", _SOON),
    Record("role:pdmux_instances:count", f"sum by ({_APP}, role) (pdmux_role)"),
    _by_role("pdmux_running_requests", "pdmux_instance_running_requests"),
    _by_role("pdmux_waiting_requests", "pdmux_instance_waiting_requests"),
    _by_role("pdmux_decoding_requests", "pdmux_instance_decoding_requests"),
    _by_role("pdmux_decode_context_tokens", "pdmux_instance_decode_context_tokens"),
    _by_role("pdmux_queued_prefill_tokens", "pdmux_instance_queued_prefill_tokens"),
)


def _burning(short: float, long: float) -> str:
    """Attainment below what so many budgets leave, over five minutes and over an hour."""
    limits = (("5m", short), ("1h", long))
    return " and ".join(
        f"app_tier:pdmux_slo_attainment:ratio{window} < {1 - budgets * (1 - ATTAINMENT):g}" for window, budgets in limits
    )


ALERTS = (
    Alert(
        "SloBurnRate",
        _burning(FAST_BUDGETS, 1),
        "2m",
        "page",
        "Requests of {{ $labels.app }} miss their SLO, tier {{ $labels.tier }}.",
        "In the last five minutes only {{ $value | humanizePercentage }} of the requests were good, and over the hour fewer "
        f"than the {ATTAINMENT:.0%} that should be.",
    ),
    Alert(
        "SloBurnRate",
        _burning(1, SLOW_BUDGETS),
        "15m",
        "ticket",
        "Requests of {{ $labels.app }} have missed their SLO for an hour, tier {{ $labels.tier }}.",
        "Over the hour fewer requests were good than should be, and still are: {{ $value | humanizePercentage }} in the last "
        "five minutes.",
    ),
    Alert(
        "KvPagesLeaked",
        'pdmux_pages{owner="held"} > 0 and on (app, instance) '
        "(pdmux_instance_running_requests + pdmux_instance_waiting_requests == 0)",
        "2m",
        "ticket",
        "KV pages of {{ $labels.instance }} are held by nobody.",
        "{{ $value }} pages are held although no request is there: they are lost until the instance is restarted.",
    ),
    Alert(
        "PredictionDrift",
        "pdmux_drifting_cells > 0",
        "10m",
        "ticket",
        "Steps of {{ $labels.instance }} no longer take what its profile says.",
        "Of {{ $value }} kinds of work the times have moved away by more than 30 %; predictions are corrected, bounds widened.",
    ),
    Alert(
        "HandoffsFenced",
        "sum by (app, instance, reason) (increase(pdmux_kv_fenced_total[10m])) > 0",
        "0m",
        "ticket",
        "{{ $labels.instance }} refused messages or writes of peers.",
        "{{ $value | humanize }} in ten minutes were {{ $labels.reason }}: a peer was restarted or cut off amid a handoff, or "
        "is not what it says.",
    ),
    Alert(
        "PrefillStarved",
        f"pdmux_oldest_waiting_seconds > {OLDEST_S:g}",
        "1m",
        "page",
        "Requests wait at {{ $labels.instance }} and are not prefilled.",
        "One has waited for {{ $value | humanizeDuration }}: there are no pages, or decodes leave prefills nothing.",
    ),
    Alert(
        "KvRecomputed",
        "sum by (app) (rate(pdmux_kv_received_tokens_total[10m]) - rate(pdmux_kv_used_tokens_total[10m])) "
        f"> {UNUSED:g} * sum by (app) (rate(pdmux_kv_received_tokens_total[10m]))",
        "10m",
        "ticket",
        "KV that instances of {{ $labels.app }} fetch is not used.",
        f"More than {UNUSED:.0%} of the tokens whose KV has landed never led to a first token: they were computed twice, or "
        "for nothing.",
    ),
    Alert(
        "PlacementStale",
        "pdmux_placement_stale == 1",
        "1m",
        "ticket",
        "The placement controller of {{ $labels.app }} has no fresh figures, so it does nothing.",
        "Roles stay as they are until its source answers again.",
    ),
    Alert(
        "InstanceDown",
        'up{component="instance"} == 0 or pdmux_linked_instances < pdmux_expected_instances',
        "1m",
        "page",
        "An instance of {{ $labels.app }} is missing.",
        "It does not answer, or the gateway {{ $labels.instance }} is linked to fewer instances than there should be.",
    ),
)


def rules() -> dict[str, Any]:
    """The document that Prometheus reads."""
    return {
        "groups": [
            _group("pdmux-records", RECORDS),
            _group("pdmux-placement", PLACEMENT) | {"interval": "5s"},
            _group("pdmux-alerts", ALERTS),
        ]
    }


def _group(name: str, members: Iterable[Record | Alert]) -> dict[str, Any]:
    return {"name": name, "rules": [each.document() for each in members]}


def rules_yaml() -> str:
    """As a file."""
    return "# Made by `pdmux dashboards` from pdmux_ray/metrics/rules.py.\n" + yaml.safe_dump(
        rules(), sort_keys=False, width=128
    )


def recorded_names() -> Sequence[str]:
    """Of all recording rules."""
    return [record.name for record in (*RECORDS, *PLACEMENT)]
