"""The catalog's rows of instances: what their engines, devices and KV ports know."""

from __future__ import annotations

from pdmux_ray.engine.timeline import STEP_BUCKETS_S
from pdmux_ray.metrics.metric import Component, Rows

_rows = Rows(Component.INSTANCE)

_LOAD = (
    _rows.gauge(
        "pdmux_instance_running_requests", "n_run", "requests", "Requests that hold pages, or whose KV comes.", important=True
    ),
    _rows.gauge("pdmux_instance_waiting_requests", "n_wait", "requests", "Requests that wait for pages.", important=True),
    _rows.gauge("pdmux_instance_decoding_requests", "n_dec", "requests", "Requests that decode.", important=True),
    _rows.gauge("pdmux_instance_decode_context_tokens", "c_dec", "tokens", "Tokens of those."),
    _rows.gauge(
        "pdmux_instance_queued_prefill_tokens",
        "q_pre",
        "tokens",
        "Tokens to be prefilled here, of requests that wait or have begun.",
        important=True,
    ),
    _rows.gauge(
        "pdmux_oldest_waiting_seconds",
        "a_wait",
        "seconds",
        "How long the one that has waited longest for pages waits; 0 when nobody does.",
        important=True,
    ),
    _rows.gauge("pdmux_instance_free_pages", "p_avail", "pages", "KV pages that are free or evictable."),
    _rows.gauge("pdmux_instance_pages", "p_all", "pages", "KV pages in all."),
    _rows.gauge(
        "pdmux_instance_leased_pages", "p_lease", "pages", "KV pages that nobody holds but a transfer that reads them."
    ),
    _rows.gauge(
        "pdmux_instance_quarantined_pages",
        "p_quar",
        "pages",
        "KV pages that nobody may have before a lost transfer has stopped writing into them.",
    ),
    _rows.gauge(
        "pdmux_pages",
        "p_owner",
        "pages",
        "KV pages by owner: free, cached, held (by requests), leased, quarantined. They add up to the pool.",
        "owner",
        important=True,
    ),
    _rows.gauge("pdmux_instance_steps", "n_step", "steps", "Steps since the engine started."),
    _rows.gauge(
        "pdmux_instance_step_age_seconds",
        "a_step",
        "seconds",
        "How long the step under way had taken when it was reported; 0 without one.",
    ),
    _rows.gauge(
        "pdmux_role", "role", "1 or 0", "1 for the role that the instance has, 0 for the others.", "role", important=True
    ),
    _rows.counter("pdmux_role_changes_total", "N_role", "changes", "Changes of its role.", important=True),
    _rows.gauge("pdmux_scrape_seconds", "s_scrape", "seconds", "How long collecting these figures took."),
)

_STEPS = (
    _rows.seconds(
        "pdmux_step_seconds",
        "S",
        STEP_BUCKETS_S,
        "How long work of the device took, by kind: decode (a step of decodes alone), prefill (a block of a prefill's layers), "
        "mixed (both in one pass).",
        "kind",
    ),
    _rows.seconds("pdmux_predicted_step_seconds", "S^", STEP_BUCKETS_S, "The same as predicted, of those that were.", "kind"),
    _rows.gauge(
        "pdmux_guard_factor",
        "g",
        "ratio",
        "Bound over prediction of the last steps and blocks: how wide the guard is.",
        important=True,
    ),
    _rows.gauge("pdmux_units", "U", "units", "Cores, or streaming multiprocessors, of a device with lanes."),
    _rows.gauge(
        "pdmux_lane_units",
        "u_lane",
        "units",
        "What each lane works on now: prefill and decode; 0 when it rests.",
        "lane",
        important=True,
    ),
    _rows.gauge(
        "pdmux_prefill_units",
        "u_pre",
        "units",
        "What the prefill lane has of them, as the device made it, by split (prefill/decode).",
        "split",
    ),
    _rows.gauge("pdmux_decode_units", "u_dec", "units", "What the decode lane has, likewise.", "split"),
    _rows.counter(
        "pdmux_steps_total",
        "N_step",
        "steps",
        "Steps of the engine, by why the policy made them up as it did.",
        "reason",
        important=True,
    ),
    _rows.counter(
        "pdmux_mode_choices_total",
        "N_why",
        "steps",
        "Steps of an engine with lanes, by why they share the device as they do.",
        "reason",
        important=True,
    ),
    _rows.counter(
        "pdmux_mode_steps_total",
        "N_mode",
        "steps",
        "Steps of an engine with lanes, by how they share the device.",
        "mode",
        important=True,
    ),
    _rows.counter(
        "pdmux_bursts_total",
        "N_burst",
        "bursts",
        "Decodes alone that a device was given at once, one step or several, by why so many.",
        "reason",
    ),
    _rows.counter(
        "pdmux_admissions_total",
        "N_admit",
        "requests",
        "Requests that were judged by when their first token would come: late ones are refused.",
        "reason",
    ),
    _rows.counter(
        "pdmux_engine_finished_total", "N_end", "requests", "Engine requests that ended, by why. A choice is one.", "reason"
    ),
    _rows.counter(
        "pdmux_prefill_tokens_total",
        "T_pre",
        "tokens",
        "Tokens computed by prefills, recomputation after preemptions included.",
        important=True,
    ),
    _rows.counter(
        "pdmux_engine_generated_tokens_total",
        "T_dec",
        "tokens",
        "Tokens sampled, also those that no client saw.",
        important=True,
    ),
    _rows.counter(
        "pdmux_wasted_tokens_total",
        "T_waste",
        "tokens",
        "Tokens sampled for requests that had ended earlier in the burst, and thrown away.",
    ),
    _rows.counter(
        "pdmux_prefix_hit_tokens_total",
        "T_hit",
        "tokens",
        "Tokens not computed because the prefix cache had them.",
        important=True,
    ),
    _rows.counter(
        "pdmux_preemptions_total",
        "N_pre",
        "requests",
        "Requests that lost their pages to older ones and went back to the queue.",
        important=True,
    ),
    _rows.counter("pdmux_page_evictions_total", "N_evict", "pages", "Cached pages given up for new content."),
)

_KV = (
    _rows.gauge(
        "pdmux_kv_peers", "n_peer", "instances", "Instances that this one is linked to, so that KV can go between them."
    ),
    _rows.counter(
        "pdmux_fetch_choices_total",
        "N_fetch",
        "requests",
        "Requests with a prefill peer, by whether and why their KV was fetched.",
        "reason",
        important=True,
    ),
    _rows.counter(
        "pdmux_fetches_total",
        "N_land",
        "transfers",
        "Transfers of KV to this instance that have ended: landed, or by what they were lost.",
        "reason",
        important=True,
    ),
    _rows.counter(
        "pdmux_exports_total", "N_exp", "prefills", "Prefills for other instances, by how they ended.", "reason", important=True
    ),
    _rows.counter(
        "pdmux_kv_received_tokens_total",
        "T_recv",
        "tokens",
        "Tokens whose KV has landed here, complete and verified.",
        important=True,
    ),
    _rows.counter(
        "pdmux_kv_used_tokens_total", "T_used", "tokens", "Received tokens from which a first token was made.", important=True
    ),
    _rows.counter(
        "pdmux_kv_landed_bytes_total",
        "B_land",
        "bytes",
        "Bytes of KV that have landed here, complete and verified.",
        important=True,
    ),
    _rows.counter(
        "pdmux_kv_landing_seconds_total",
        "s_land",
        "seconds",
        "From asking for KV until it had landed, summed over what landed.",
        important=True,
    ),
    _rows.counter(
        "pdmux_kv_wasted_bytes_total", "B_waste", "bytes", "Bytes of KV that came for transfers that were lost.", important=True
    ),
    _rows.counter(
        "pdmux_kv_quarantines_total",
        "N_quar",
        "transfers",
        "Transfers that were lost while the peer could still write: their pages were in quarantine.",
        important=True,
    ),
    _rows.counter("pdmux_kv_quarantine_seconds_total", "s_quar", "seconds", "Summed over quarantines that have ended."),
    _rows.counter(
        "pdmux_kv_unsent_total",
        "N_unsent",
        "prefills",
        "Prefills for others that did not get there whole, by why.",
        "reason",
        important=True,
    ),
    _rows.counter(
        "pdmux_kv_written_bytes_total", "B_wr", "bytes", "Bytes of KV that were written to other instances.", important=True
    ),
    _rows.counter(
        "pdmux_kv_written_seconds_total",
        "s_wr",
        "seconds",
        "From the begin of such a write to its end, summed: several run at once.",
        important=True,
    ),
    _rows.counter("pdmux_kv_writes_total", "N_wr", "writes", "Writes to other instances."),
    _rows.counter("pdmux_kv_failed_writes_total", "N_fail", "writes", "Of these, those that failed.", important=True),
    _rows.counter(
        "pdmux_kv_fenced_total",
        "N_fence",
        "messages",
        "Messages and notes of peers that were refused, by why: stale, replayed or mismatched.",
        "reason",
        important=True,
    ),
    _rows.counter(
        "pdmux_kv_refused_peers_total",
        "N_refuse",
        "connections",
        "Connections with instances that cannot be peers: other software, model or secret.",
        important=True,
    ),
    _rows.counter(
        "pdmux_kv_silent_peers_total",
        "N_silent",
        "peers",
        "Peers that were given up because they said nothing for too long.",
        important=True,
    ),
)

_PREDICTIONS = (
    _rows.counter(
        "pdmux_predicted_times_total",
        "N_pred",
        "times",
        "Times of decodes, blocks and one-pass steps that were held against their prediction.",
        important=True,
    ),
    _rows.counter("pdmux_exceeded_bounds_total", "N_over", "times", "Times above their 99 % bound.", important=True),
    _rows.gauge(
        "pdmux_drifting_cells",
        "n_drift",
        "cells",
        "Kinds of work whose times have moved away from the profile: at 0 it fits.",
        important=True,
    ),
    _rows.gauge(
        "pdmux_correction_factor",
        "f_far",
        "ratio",
        "Measured over predicted by the profile, of the kind of work furthest from it.",
        important=True,
    ),
    _rows.gauge(
        "pdmux_prediction_factor",
        "f",
        "ratio",
        "Measured over predicted by the profile, of a kind of work alone on the device.",
        "kind",
    ),
    _rows.gauge("pdmux_bound_factor", "f_b", "ratio", "The same of its 99 % bound: what routes are predicted with.", "kind"),
)

INSTANCE_METRICS = (*_LOAD, *_STEPS, *_KV, *_PREDICTIONS)
