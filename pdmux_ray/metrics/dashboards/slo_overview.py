"""Do the SLOs hold; if not, why not; and what did the placement do about it?"""

from __future__ import annotations

from pdmux_ray.metrics.dashboards.panel import (
    NO_LIMIT,
    REQUESTS_PER_S,
    SECONDS,
    SHARE,
    Dashboard,
    Form,
    Panel,
    Query,
    Row,
    bad_from,
    count,
    warns_from,
)
from pdmux_ray.metrics.dashboards.queries import APP, mean, of, quantile, rate, rates_by, total
from pdmux_ray.metrics.dashboards.shared import (
    ATTAINMENT_LEVELS,
    ATTAINMENT_OVER_TIME,
    GOOD,
    INSTANCES_BY_ROLE,
    QUEUED_BY_ROLE,
    ROLE_CHANGES,
    WAITING,
)

FIRING = 'alertstate="firing"'

FIGURES = (
    Panel(
        "SLO attainment, 5 minutes",
        "Share of requests that were good: complete, first token and token gaps within the objectives of their tier.",
        SHARE,
        ATTAINMENT_LEVELS,
        (Query(of("app_tier:pdmux_slo_attainment:ratio5m", where=APP), "{{tier}}"),),
        Form.FIGURES,
        columns=6,
    ),
    Panel(
        "SLO attainment, 1 hour",
        "The same over an hour: what the slow burn alert looks at.",
        SHARE,
        ATTAINMENT_LEVELS,
        (Query(of("app_tier:pdmux_slo_attainment:ratio1h", where=APP), "{{tier}}"),),
        Form.FIGURES,
        columns=6,
    ),
    Panel(
        "Good requests",
        "Requests a second that met the objectives of their tier: the goodput of this moment's load.",
        REQUESTS_PER_S,
        NO_LIMIT,
        (Query(rate("pdmux_slo_requests_total", GOOD, by="tier", where=APP), "{{tier}}"),),
        Form.FIGURES,
        columns=6,
    ),
    Panel(
        "Alerts that fire",
        "How many alerts of the rules fire now. Each names its runbook.",
        count("alerts"),
        bad_from(1),
        (Query(f"sum({of('ALERTS', FIRING, where=APP)}) or vector(0)", "firing"),),
        Form.FIGURES,
        columns=6,
    ),
)

HOLD = (
    ATTAINMENT_OVER_TIME,
    Panel(
        "Time to first token",
        "From the arrival of the body to the first token. Above the objective of its tier a request is a miss; where prompts "
        "are given longer by their length, the objective drawn is that of an empty prompt.",
        SECONDS,
        NO_LIMIT,
        (
            Query(of("app:pdmux_ttft_seconds:p50_5m", where=APP), "p50"),
            Query(of("app:pdmux_ttft_seconds:p99_5m", where=APP), "p99"),
            Query(f"max by (tier) ({of('pdmux_slo_ttft_seconds', where=APP)})", "objective, {{tier}}", dashed=True),
        ),
    ),
    Panel(
        "Inter-token latency",
        "Gap between two arrivals of a choice's tokens, of all gaps together. The objective is one of each request's own gaps.",
        SECONDS,
        NO_LIMIT,
        (
            Query(of("app:pdmux_itl_seconds:p50_5m", where=APP), "p50"),
            Query(of("app:pdmux_itl_seconds:p99_5m", where=APP), "p99"),
            Query(f"max by (tier) ({of('pdmux_slo_itl_seconds', where=APP)})", "objective, {{tier}}", dashed=True),
        ),
    ),
    Panel(
        "Verdicts",
        "Judged requests a second by why they are or are not good. What is not good is named by the first cause that holds.",
        REQUESTS_PER_S,
        NO_LIMIT,
        rates_by("pdmux_slo_requests_total", "verdict", APP),
        Form.STACK,
    ),
    Panel(
        "Time per output token",
        "Mean gap per token of each request, without the first token.",
        SECONDS,
        NO_LIMIT,
        tuple(Query(quantile(q, "pdmux_time_per_output_token_seconds", where=APP), f"p{q * 100:g}") for q in (0.5, 0.99)),
    ),
    Panel(
        "Whole requests",
        "From the arrival of the body to the last token, of complete requests.",
        SECONDS,
        NO_LIMIT,
        tuple(Query(quantile(q, "pdmux_request_seconds", where=APP), f"p{q * 100:g}") for q in (0.5, 0.99)),
    ),
)

_FIRST_TOKENS = f"scalar({rate('pdmux_time_to_first_token_seconds_count', where=APP)})"

WHY = (
    Panel(
        "Where the time to the first token goes",
        "Mean seconds of each stage. The stages add up to the mean time to first token: gateway, queue of the instance, "
        "transfer of KV, prefill, delivery.",
        SECONDS,
        NO_LIMIT,
        (Query(f"{rate('pdmux_first_token_stage_seconds_sum', by='stage', where=APP)} / {_FIRST_TOKENS}", "{{stage}}"),),
        Form.STACK,
    ),
    Panel(
        "First tokens as predicted",
        "Mean time to first token, as it was and as the route's choice predicted it. Far apart: the latency profile does not "
        "fit what runs.",
        SECONDS,
        NO_LIMIT,
        (
            Query(mean("pdmux_time_to_first_token_seconds", where=APP), "measured"),
            Query(mean("pdmux_predicted_time_to_first_token_seconds", where=APP), "predicted", dashed=True),
        ),
    ),
    WAITING,
    Panel(
        "Requests by how they ended",
        "Refused are 4xx, the queue's 429 among them; failed are 5xx and streams that broke off.",
        REQUESTS_PER_S,
        NO_LIMIT,
        rates_by("pdmux_requests_total", "outcome", APP),
        Form.STACK,
    ),
    Panel(
        "Tokens",
        "A second: prompts of accepted requests, what of them a prefix cache had, and what was generated.",
        count("tokens/s"),
        NO_LIMIT,
        (
            Query(of("app:pdmux_prompt_tokens:rate1m", where=APP), "prompt"),
            Query(of("app:pdmux_cached_prompt_tokens:rate1m", where=APP), "prompt, cached"),
            Query(of("app:pdmux_generated_tokens:rate1m", where=APP), "generated"),
        ),
    ),
    Panel(
        "Answers that changed instance",
        "A second: their instance went away, and another one goes on, or not.",
        REQUESTS_PER_S,
        warns_from(0.01),
        rates_by("pdmux_resumed_requests_total", "outcome", APP),
    ),
)

ABOUT_IT = (
    INSTANCES_BY_ROLE,
    QUEUED_BY_ROLE,
    ROLE_CHANGES,
)

LOAD = (
    Panel(
        "Instances at the gateways",
        "That each gateway has a line to, and that there should be. Fewer linked than expected: instances start, or are gone.",
        count("instances"),
        NO_LIMIT,
        (
            Query(of("pdmux_linked_instances", where=APP), "{{instance}}, linked"),
            Query(of("pdmux_expected_instances", where=APP), "{{instance}}, expected", dashed=True),
        ),
        columns=6,
    ),
    Panel(
        "Offered requests",
        "A second, however they ended.",
        REQUESTS_PER_S,
        NO_LIMIT,
        (Query(of("app:pdmux_requests:rate1m", where=APP), "{{app}}"),),
        columns=6,
    ),
    Panel(
        "Requests under way",
        "Open at the gateways.",
        count("requests"),
        NO_LIMIT,
        (Query(total("pdmux_open_requests", by="instance", where=APP), "{{instance}}"),),
        columns=6,
    ),
    Panel(
        "Routes",
        "Requests a second by why their instance, and the source of their KV, were chosen.",
        REQUESTS_PER_S,
        NO_LIMIT,
        rates_by("pdmux_routed_requests_total", "reason", APP),
        Form.STACK,
        columns=6,
    ),
)

DASHBOARD = Dashboard(
    "slo_overview",
    "SLO overview",
    "Do the SLOs hold, why not, and what did the placement do about it?",
    (
        Row("At this moment", FIGURES),
        Row("Do they hold?", HOLD),
        Row("Why not?", WHY),
        Row("What was done about it", ABOUT_IT),
        Row("What is asked", LOAD),
    ),
)
