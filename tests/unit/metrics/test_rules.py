"""Rules ask for what there is. Whether Prometheus can read them, tests/ray says."""

from __future__ import annotations

import re

import yaml

from pdmux_ray.metrics.catalog import CATALOG, Kind
from pdmux_ray.metrics.rules import ALERTS, PLACEMENT, RECORDS, recorded_names, rules, rules_yaml

SUFFIXES = {Kind.HISTOGRAM: ("_bucket", "_sum", "_count"), Kind.COUNTER: ("",), Kind.GAUGE: ("",)}
EXPORTED = {metric.name + suffix for metric in CATALOG.values() for suffix in SUFFIXES[metric.kind]}


def asked(expr: str) -> set[str]:
    return set(re.findall(r"(?:[a-z_]+:)?pdmux_[a-z_]+(?::[a-z0-9_]+)?", expr))


def test_rules_and_alerts_ask_for_metrics_of_the_catalog_and_for_what_rules_record() -> None:
    expressions = [rule.expr for rule in (*RECORDS, *PLACEMENT, *ALERTS)]
    assert set().union(*map(asked, expressions)) <= EXPORTED | set(recorded_names())


def test_a_counter_is_never_asked_for_but_by_its_rate_or_increase() -> None:
    counters = [metric.name for metric in CATALOG.values() if metric.kind is Kind.COUNTER]
    for rule in (*RECORDS, *PLACEMENT, *ALERTS):
        bare = re.sub(r"(rate|increase)\([^()]*\)", "", rule.expr)
        assert [name for name in counters if name in bare] == [], rule.name


def test_the_file_is_the_document_and_every_alert_says_what_to_do() -> None:
    document = yaml.safe_load(rules_yaml())
    assert document == rules()
    alerts = [rule for group in document["groups"] for rule in group["rules"] if "alert" in rule]
    assert len(alerts) == len(ALERTS)
    for alert in alerts:
        assert alert["annotations"].keys() == {"summary", "description", "runbook"}
        assert alert["annotations"]["runbook"] == f"docs/operations.md#{alert['alert'].lower()}"


def test_no_two_rules_record_under_one_name() -> None:
    assert sorted(recorded_names()) == sorted(set(recorded_names()))
