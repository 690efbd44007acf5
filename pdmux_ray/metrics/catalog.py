"""Every metric of the project, as data: name, symbol, unit, labels, buckets and meaning stand here and nowhere else.

Exports, recording rules, dashboards and docs/metrics.md are made from it. No label names the process that a figure is of:
whoever scrapes it knows. The rows of instances are in `metrics/instance_rows.py`.

Seconds of a gateway are what it sees: from the arrival of the HTTP request's body to the engine's news reaching the handler, by
the functions of `metrics/lifeline.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pdmux_ray.metrics.instance_rows import INSTANCE_METRICS
from pdmux_ray.metrics.metric import Component, Kind, Metric, Rows

__all__ = ["CATALOG", "REQUEST_BUCKETS_S", "STAGE_BUCKETS_S", "TOKEN_BUCKETS_S", "Component", "Kind", "Metric"]

TOKEN_BUCKETS_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
REQUEST_BUCKETS_S = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
STAGE_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, *REQUEST_BUCKETS_S)

_rows = Rows(Component.GATEWAY)

_REQUESTS = (
    _rows.counter(
        "pdmux_requests_total",
        "N_req",
        "requests",
        "Completion requests by how they ended.",
        *("endpoint", "outcome"),
        important=True,
    ),
    _rows.counter(
        "pdmux_routed_requests_total", "N_route", "requests", "Requests sent to an instance, by routing reason.", "reason"
    ),
    _rows.counter(
        "pdmux_resumed_requests_total",
        "N_moved",
        "requests",
        "Requests whose instance went away, by outcome.",
        "outcome",
        important=True,
    ),
    _rows.counter("pdmux_prompt_tokens_total", "T_prompt", "tokens", "Prompt tokens of accepted requests.", important=True),
    _rows.counter(
        "pdmux_cached_prompt_tokens_total",
        "T_cached",
        "tokens",
        "Prompt tokens found in a prefix cache, of answers that have ended.",
        important=True,
    ),
    _rows.counter(
        "pdmux_generated_tokens_total", "T_gen", "tokens", "Tokens generated, of answers that have ended.", important=True
    ),
    _rows.gauge("pdmux_open_requests", "n_open", "requests", "Completion requests under way.", important=True),
    _rows.gauge("pdmux_linked_instances", "n_linked", "instances", "Instances that this gateway has a line to."),
    _rows.gauge(
        "pdmux_expected_instances",
        "n_expected",
        "instances",
        "Instances that there should be; where placement.replicas lets their number change, at least.",
    ),
    _rows.seconds("pdmux_time_to_first_token_seconds", "TTFT", REQUEST_BUCKETS_S, "Until the first token."),
    _rows.seconds(
        "pdmux_predicted_time_to_first_token_seconds",
        "TTFT^",
        REQUEST_BUCKETS_S,
        "The same as predicted, of requests routed so.",
    ),
    _rows.seconds("pdmux_inter_token_seconds", "ITL", TOKEN_BUCKETS_S, "Gap between two arrivals of a choice's tokens."),
    _rows.seconds(
        "pdmux_time_per_output_token_seconds",
        "TPOT",
        TOKEN_BUCKETS_S,
        "Mean gap per token of a complete choice: (last token - first token) / (tokens - 1).",
    ),
    _rows.seconds("pdmux_request_seconds", "E2E", REQUEST_BUCKETS_S, "Until the last token, if complete."),
    _rows.seconds(
        "pdmux_first_token_stage_seconds",
        "S_stage",
        STAGE_BUCKETS_S,
        "Where TTFT went; the stages of a first token add up to it. gateway: until it was sent to the instance that made it; "
        "queue: waiting there; transfer: its KV on the way there; prefill: being computed; delivery: from the gateway to the "
        "instance and back.",
        "stage",
    ),
)

_SLOS = (
    _rows.counter(
        "pdmux_slo_requests_total",
        "N_slo",
        "requests",
        "Requests by SLO tier and verdict (docs/goodput.md): good, or what was missed. Without those whose client went away or "
        "asked for what cannot be (4xx but 429).",
        *("tier", "verdict"),
        important=True,
    ),
    _rows.gauge("pdmux_slo_ttft_seconds", "L_ttft", "seconds", "TTFT objective of a tier, of a prompt without tokens.", "tier"),
    _rows.gauge("pdmux_slo_ttft_seconds_per_token", "L_token", "seconds", "What each prompt token adds to it.", "tier"),
    _rows.gauge("pdmux_slo_itl_seconds", "L_itl", "seconds", "ITL objective of a tier.", "tier"),
)

_controller = Rows(Component.CONTROLLER)

_PLACEMENT = (
    _controller.counter(
        "pdmux_placement_decisions_total",
        "N_place",
        "decisions",
        "Looks of the placement controller at the cluster, by what came of them and why.",
        "reason",
        important=True,
    ),
    _controller.gauge(
        "pdmux_placement_instances",
        "n_role",
        "instances",
        "Instances by role, in three states: planned (by the policy), requested (of the instances), observed.",
        *("role", "state"),
        important=True,
    ),
    _controller.gauge(
        "pdmux_placement_age_seconds",
        "a_place",
        "seconds",
        "Age of the newest figures that the controller has.",
        important=True,
    ),
    _controller.gauge(
        "pdmux_placement_stale",
        "stale",
        "1 or 0",
        "1 while its figures are too old or missing, so that it does nothing.",
        important=True,
    ),
    _controller.gauge(
        "pdmux_placement_demand",
        "d_phase",
        "instances",
        "Instances that each phase (prefill, decode) would keep busy all the time, by the controller's figures.",
        "phase",
        important=True,
    ),
    _controller.gauge("pdmux_placement_replicas", "n_want", "instances", "Instances that Serve should have, where it says so."),
    _controller.gauge("pdmux_placement_idle_pins", "n_pin", "pins", "Pins by an id that no instance has."),
)

CATALOG: Mapping[str, Metric] = MappingProxyType(
    {metric.name: metric for metric in (*_REQUESTS, *_SLOS, *INSTANCE_METRICS, *_PLACEMENT)}
)
