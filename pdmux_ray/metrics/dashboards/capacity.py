"""How much of the cluster is used, and what would run out first?"""

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
    bad_below,
    count,
    warns_from,
)
from pdmux_ray.metrics.dashboards.queries import APP, INSTANCE, of, rate, share, total
from pdmux_ray.metrics.dashboards.shared import DECODING_BY_ROLE, GOOD, QUEUE_AGE, WAITING

GATEWAYS, INSTANCES = 'component="gateway"', 'component="instance"'

_INSTANCES = f"scalar({total('up', INSTANCES, where=APP)})"
_HITS = "pdmux_prefix_hit_tokens_total"
_PAGES_IN_USE = f"1 - {of('pdmux_instance_free_pages')} / {of('pdmux_instance_pages')}"

FIGURES = (
    Panel(
        "Instances that answer",
        "That Prometheus could scrape.",
        count("instances"),
        bad_below(1),
        (Query(total("up", INSTANCES, where=APP), "instances"),),
        Form.FIGURES,
        columns=6,
    ),
    Panel(
        "Gateways that answer",
        "That Prometheus could scrape.",
        count("gateways"),
        bad_below(1),
        (Query(total("up", GATEWAYS, where=APP), "gateways"),),
        Form.FIGURES,
        columns=6,
    ),
    Panel(
        "Fullest KV pool",
        "Share of the pages that are neither free nor evictable, of the instance that has least room.",
        SHARE,
        warns_from(0.9, bad=0.98),
        (Query(f"max({_PAGES_IN_USE})", "in use"),),
        Form.FIGURES,
        columns=6,
    ),
    Panel(
        "Good requests per instance",
        "A second: the goodput that each device gives at this load.",
        REQUESTS_PER_S,
        NO_LIMIT,
        (Query(f"{rate('pdmux_slo_requests_total', GOOD, where=APP)} / {_INSTANCES}", "per instance"),),
        Form.FIGURES,
        columns=6,
    ),
)

ROOM = (
    Panel(
        "KV pages in use",
        "Share of each instance's pages that are neither free nor evictable. At 1 requests wait, or lose their pages.",
        SHARE,
        warns_from(0.9, bad=0.98),
        (Query(_PAGES_IN_USE, "{{instance}}"),),
    ),
    Panel(
        "Requests that hold pages",
        "On each instance; at most `engine.max_batch`.",
        count("requests"),
        NO_LIMIT,
        (Query(of("pdmux_instance_running_requests"), "{{instance}}"),),
    ),
    WAITING,
    QUEUE_AGE,
    Panel(
        "Pages in the cluster",
        "By owner, of all instances.",
        count("pages"),
        NO_LIMIT,
        (Query(total("pdmux_pages", by="owner"), "{{owner}}"),),
        Form.STACK,
    ),
    Panel(
        "Work that was lost to a lack of pages",
        "Requests a second that lost their pages and are computed anew, on each instance.",
        REQUESTS_PER_S,
        warns_from(0.1),
        (Query(rate("pdmux_preemptions_total", by="instance"), "{{instance}}"),),
    ),
)

WORK = (
    Panel(
        "Tokens generated",
        "A second, by each instance.",
        count("tokens/s"),
        NO_LIMIT,
        (Query(rate("pdmux_engine_generated_tokens_total", by="instance"), "{{instance}}"),),
        Form.STACK,
    ),
    Panel(
        "Tokens prefilled",
        "A second, by each instance; what is computed anew counts again.",
        count("tokens/s"),
        NO_LIMIT,
        (Query(rate("pdmux_prefill_tokens_total", by="instance"), "{{instance}}"),),
        Form.STACK,
    ),
    Panel(
        "Prefix hits",
        "Share of prompt tokens that an instance's prefix cache had.",
        SHARE,
        NO_LIMIT,
        (Query(share(_HITS, _HITS, "pdmux_prefill_tokens_total", by="instance"), "{{instance}}"),),
    ),
    Panel(
        "Steps",
        "A second, of each instance.",
        count("steps/s"),
        NO_LIMIT,
        (Query(rate("pdmux_steps_total", by="instance"), "{{instance}}"),),
    ),
    DECODING_BY_ROLE,
    Panel(
        "What a scrape takes",
        "Seconds to gather an instance's figures.",
        SECONDS,
        warns_from(0.1, bad=1),
        (Query(of("pdmux_scrape_seconds", where=INSTANCE), "{{instance}}"),),
    ),
)

DASHBOARD = Dashboard(
    "capacity",
    "Cluster capacity",
    "How much of the cluster is used, and what would run out first?",
    (Row("At this moment", FIGURES), Row("Room", ROOM), Row("Work", WORK)),
)
