"""Panels that more than one dashboard has."""

from __future__ import annotations

from pdmux_ray.metrics.dashboards.panel import (
    NO_LIMIT,
    SECONDS,
    SHARE,
    Form,
    Panel,
    Query,
    bad_below,
    count,
    warns_from,
)
from pdmux_ray.metrics.dashboards.queries import APP, ROLE, WINDOW, of
from pdmux_ray.metrics.rules import ATTAINMENT

GOOD = 'verdict="good"'
ATTAINMENT_LEVELS = bad_below(ATTAINMENT, fine=(1 + ATTAINMENT) / 2)

ATTAINMENT_OVER_TIME = Panel(
    "SLO attainment",
    "Share of good requests by tier, of the last five minutes at each moment.",
    SHARE,
    ATTAINMENT_LEVELS,
    (Query(of("app_tier:pdmux_slo_attainment:ratio5m", where=APP), "{{tier}}"),),
)
INSTANCES_BY_ROLE = Panel(
    "Instances by role",
    "By what each instance says of itself. A change of this picture is what the placement, or an operator, did.",
    count("instances"),
    NO_LIMIT,
    (Query(of("role:pdmux_instances:count", where=ROLE), "{{role}}"),),
    Form.STEPS,
)
QUEUED_BY_ROLE = Panel(
    "Queued prompt tokens by role",
    "Waiting to be prefilled. Where it grows, that role is short of instances.",
    count("tokens"),
    NO_LIMIT,
    (Query(of("role:pdmux_queued_prefill_tokens:sum", where=ROLE), "{{role}}"),),
    Form.STACK,
)
DECODING_BY_ROLE = Panel(
    "Requests that decode, by role",
    "Of all instances in a role. Long answers raise it.",
    count("requests"),
    NO_LIMIT,
    (Query(of("role:pdmux_decoding_requests:sum", where=ROLE), "{{role}}"),),
    Form.STACK,
)
ROLE_CHANGES = Panel(
    "Role changes",
    "Of each instance, over the time of one point.",
    count("changes"),
    NO_LIMIT,
    (Query(f"sum by (instance) (increase({of('pdmux_role_changes_total')}[{WINDOW}]))", "{{instance}}"),),
)
WAITING = Panel(
    "Requests that wait",
    "For pages or a place, on each instance. Beyond `engine.max_waiting` they are refused.",
    count("requests"),
    warns_from(16, bad=128),
    (Query(of("pdmux_instance_waiting_requests"), "{{instance}}"),),
)
QUEUE_AGE = Panel(
    "Age of the queue",
    "How long the request that waits longest has waited, on each instance.",
    SECONDS,
    warns_from(1, bad=10),
    (Query(of("pdmux_oldest_waiting_seconds"), "{{instance}}"),),
)
