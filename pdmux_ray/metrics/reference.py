"""docs/metrics.md, from the catalog and the rules: `python -m pdmux_ray.metrics.reference > docs/metrics.md`."""

from __future__ import annotations

from collections.abc import Iterable

from pdmux_ray.metrics.catalog import CATALOG, Component, Kind, Metric
from pdmux_ray.metrics.rules import ALERTS, PLACEMENT, RECORDS

_TITLES = {
    Component.GATEWAY: "## Gateways",
    Component.INSTANCE: "## Instances",
    Component.CONTROLLER: "## Placement controller",
}

_HEAD = """# Metrics

This file is made by `python -m pdmux_ray.metrics.reference` from the catalog (`metrics/catalog.py`) and the rules
(`metrics/rules.py`).

## Where they are

Every process, a gateway, an instance or the placement controller, serves its own figures as `GET /metrics` on a port of its
own, on the node's address (under `scripts/serve` that is loopback). They are collected when a scrape comes. `GET
/metrics/targets` of the HTTP front lists these ports in the form of Prometheus' HTTP service discovery; a process that ends
leaves the list, and its series end with it. A gateway that has just begun answers 503 there until it knows all instances, for
at most 30 s: Prometheus then keeps the list that it has. With `gateway.api_keys_env` all of these ask for a key as the API does
(`Authorization: Bearer`).

```yaml
scrape_configs:
  - job_name: pdmux
    scrape_interval: 5s
    http_sd_configs: [{url: "http://127.0.0.1:8000/metrics/targets", refresh_interval: 5s}]
rule_files: [rules.yaml]
```

`GET /metrics` of the front is for people and scripts: one gateway's own figures, and counters and gauges of each instance as
they came with its last heartbeat, a second old at most, with the labels `gateway` and `instance`. Take the ports or the
front: not both.

Ten gauges are there once more in what Ray exports (`serve/mirror.py`), for its dashboard. All are gauges, because Ray forgets
those of a process that has ended, and keeps what it counted of one as long as the node lives. `python -m
pdmux_ray.bench.restarts` kills four instances again and again: before and after 100 restarts there were 5 targets,
1,220 series on their ports, 688 on the front and 28 of ours in Ray's export, of 5 replicas. All that Ray exports grew from
2,114 series to 6,389: what it and Serve count of replicas themselves stays, which is why the ports do not go through Ray.

## Labels

No figure says which process it is of. The labels of a target do: `instance` (an instance's id, as `pdmux role` lists it, or a
gateway's), `component` (gateway, instance or controller), `app` (of Serve) and `model` (as clients call it). The role is a
metric, so that its change begins no new series of any other. Values of labels are few and known beforehand: kinds, reasons,
tiers, splits; never a request.

## SLO tiers

```yaml
gateway:
  slo:
    default: {ttft_s: 0.5, ttft_s_per_token: 0.001, itl_s: 0.05}
    batch: {ttft_s: 10, itl_s: 0.5, itl_statistic: mean}
```

A request names its tier by OpenAI's `service_tier` (`auto`, and none at all, is `default`). The tier default is always there;
when it is not given, it has the objectives of `engine.multiplex`. Each request is judged once, when it ends, by the
definition of [goodput.md](goodput.md), with the times that its gateway saw: from the arrival of its body. A request with
several choices is as good as its worst one. Tiers are for measuring alone: they change nothing in how a request is served.

## Identities

For every first token the stages of `pdmux_first_token_stage_seconds` add up to TTFT: so do the sums of both histograms. The
gateway measures when it sends a request and when its token comes; what happened between, the instance tells in durations; so
no two clocks are compared. At any moment the pages of `pdmux_pages` add up to `pdmux_instance_pages`. Of the same work
`pdmux_step_seconds` has what it took and `pdmux_predicted_step_seconds` what was predicted, over the same buckets.

Sums and counts of histograms are exact; a quantile that Prometheus makes of the buckets is within one bucket.
"""

_COLUMNS = "| metric | symbol | kind | unit | labels | meaning |\n|---|---|---|---|---|---|"


def markdown() -> str:
    """The whole file."""
    parts = [_HEAD]
    for component, title in _TITLES.items():
        rows = [_row(metric) for metric in CATALOG.values() if metric.component is component]
        parts.append("\n".join([title, "", _COLUMNS, *rows]) + "\n")
    parts.append(
        "\n".join(["## Buckets", "", "Upper bounds in seconds; above the last one there is one more.", "", *_buckets()]) + "\n"
    )
    parts.append("\n".join(["## Recording rules", "", "| record | expression |", "|---|---|", *_records()]) + "\n")
    parts.append("\n".join(["## Alerts", "", "| alert | when | for | severity |", "|---|---|---|---|", *_alerts()]) + "\n")
    return "\n".join(parts)


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.symbol} | {metric.kind} | {metric.unit} | {labels} | {metric.meaning} |"


def _buckets() -> Iterable[str]:
    for metric in CATALOG.values():
        if metric.kind is Kind.HISTOGRAM:
            yield f"- `{metric.name}`: {', '.join(f'{bound:g}' for bound in metric.buckets)}"


def _records() -> Iterable[str]:
    return (f"| `{record.name}` | `{record.expr}` |" for record in (*RECORDS, *PLACEMENT))


def _alerts() -> Iterable[str]:
    for alert in ALERTS:
        link = f"[{alert.name}](operations.md#{alert.name.lower()})"
        yield f"| {link} | `{alert.expr}` | {alert.after} | {alert.severity} |"


if __name__ == "__main__":
    print(markdown(), end="")
