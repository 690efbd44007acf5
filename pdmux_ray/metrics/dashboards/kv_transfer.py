"""Does KV get from one instance to another, how fast, and is any of it lost?"""

from __future__ import annotations

from pdmux_ray.metrics.dashboards.panel import (
    BYTES_PER_S,
    NO_LIMIT,
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
from pdmux_ray.metrics.dashboards.queries import of, rate, rates_by, share

LANDED = 'reason="landed"'
PER_S = count("transfers/s")

_WRITTEN = rate("pdmux_kv_written_bytes_total", by="instance")
_LANDING = rate("pdmux_kv_landing_seconds_total", by="instance")

FLOW = (
    Panel(
        "KV that lands",
        "Bytes a second, complete and verified, by the instance that asked for them.",
        BYTES_PER_S,
        NO_LIMIT,
        (Query(rate("pdmux_kv_landed_bytes_total", by="instance"), "{{instance}}"),),
    ),
    Panel(
        "KV that is written",
        "Bytes a second to other instances, by the instance that writes.",
        BYTES_PER_S,
        NO_LIMIT,
        (Query(_WRITTEN, "{{instance}}"),),
    ),
    Panel(
        "Bandwidth of a write",
        "Bytes over seconds of writes to other instances: what the link gives one of them.",
        BYTES_PER_S,
        NO_LIMIT,
        (Query(f"{_WRITTEN} / {rate('pdmux_kv_written_seconds_total', by='instance')}", "{{instance}}"),),
    ),
    Panel(
        "Time until KV has landed",
        "Mean, from asking for it: the peer's queue and prefill are in it.",
        SECONDS,
        NO_LIMIT,
        (Query(f"{_LANDING} / {rate('pdmux_fetches_total', LANDED, by='instance')}", "{{instance}}"),),
    ),
    Panel(
        "Writes",
        "A second to other instances, and those that failed.",
        count("writes/s"),
        NO_LIMIT,
        (Query(rate("pdmux_kv_writes_total"), "writes"), Query(rate("pdmux_kv_failed_writes_total"), "failed")),
    ),
    Panel(
        "Linked peers",
        "Instances that each one is linked to, so that KV can go between them.",
        count("peers"),
        NO_LIMIT,
        (Query(of("pdmux_kv_peers"), "{{instance}}"),),
    ),
)

HANDOFFS = (
    Panel(
        "Whether KV is fetched",
        "Requests with a prefill peer a second, by whether and why their KV was fetched.",
        count("requests/s"),
        NO_LIMIT,
        rates_by("pdmux_fetch_choices_total", "reason"),
        Form.STACK,
    ),
    Panel(
        "Fetches by how they ended",
        "A second: landed, or by what they were lost. A lost one is prefilled where it decodes.",
        PER_S,
        NO_LIMIT,
        rates_by("pdmux_fetches_total", "reason"),
        Form.STACK,
    ),
    Panel(
        "Prefills for others",
        "A second, by how they ended.",
        PER_S,
        NO_LIMIT,
        rates_by("pdmux_exports_total", "reason"),
        Form.STACK,
    ),
    Panel(
        "KV that was used",
        "Share of received tokens from which a first token was made.",
        SHARE,
        NO_LIMIT,
        (Query(share("pdmux_kv_used_tokens_total", "pdmux_kv_received_tokens_total"), "used"),),
    ),
    Panel(
        "Tokens received and used",
        "A second: KV that landed, and KV from which a first token was made.",
        count("tokens/s"),
        NO_LIMIT,
        (
            Query(rate("pdmux_kv_received_tokens_total"), "received"),
            Query(rate("pdmux_kv_used_tokens_total"), "used"),
        ),
    ),
    Panel(
        "KV that came in vain",
        "Bytes a second for transfers that were lost.",
        BYTES_PER_S,
        warns_from(1),
        (Query(rate("pdmux_kv_wasted_bytes_total", by="instance"), "{{instance}}"),),
    ),
)

FAULTS = (
    Panel(
        "Fenced",
        "Messages and notes of peers a second that were refused as stale, replayed or mismatched. None are expected without a "
        "fault.",
        count("messages/s"),
        bad_from(0.01),
        rates_by("pdmux_kv_fenced_total", "reason"),
    ),
    Panel(
        "Prefills that did not get there",
        "A second, by why.",
        PER_S,
        warns_from(0.01),
        rates_by("pdmux_kv_unsent_total", "reason"),
    ),
    Panel(
        "Peers refused and given up",
        "A second: connections with instances of other software, model or secret; peers that said nothing for too long.",
        count("peers/s"),
        warns_from(0.01),
        (Query(rate("pdmux_kv_refused_peers_total"), "refused"), Query(rate("pdmux_kv_silent_peers_total"), "silent")),
    ),
    Panel(
        "Pages that a transfer holds",
        "Leased to one that reads them, and in quarantine until a lost one has stopped writing. Pages that stay without "
        "transfers are a leak.",
        count("pages"),
        NO_LIMIT,
        (
            Query(of("pdmux_instance_leased_pages"), "{{instance}}, leased"),
            Query(of("pdmux_instance_quarantined_pages"), "{{instance}}, quarantined"),
        ),
    ),
    Panel(
        "Quarantines",
        "A second: transfers that were lost while the peer could still write.",
        count("quarantines/s"),
        warns_from(0.01),
        (Query(rate("pdmux_kv_quarantines_total", by="instance"), "{{instance}}"),),
    ),
    Panel(
        "Time in quarantine",
        "Seconds of quarantine that have ended, a second.",
        count("s/s"),
        NO_LIMIT,
        (Query(rate("pdmux_kv_quarantine_seconds_total", by="instance"), "{{instance}}"),),
    ),
)

DASHBOARD = Dashboard(
    "kv_transfer",
    "KV transfer",
    "Does KV get from one instance to another, how fast, and is any of it lost?",
    (Row("How much, how fast", FLOW), Row("Handoffs", HANDOFFS), Row("What went wrong", FAULTS)),
)
