"""What does one instance do, and does it do it as predicted?"""

from __future__ import annotations

from pdmux_ray.metrics.dashboards.panel import (
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
from pdmux_ray.metrics.dashboards.queries import mean, of, quantile, rate, rates_by, share
from pdmux_ray.metrics.dashboards.shared import QUEUE_AGE

STEPS_PER_S = count("steps/s")

LANES = (
    Panel(
        "Units per lane",
        "Compute units (SMs, or cores) that each lane has, stacked: the split over time. Above the device's units "
        "both lanes share some.",
        count("units"),
        NO_LIMIT,
        (Query(of("pdmux_lane_units"), "{{lane}}"),),
        Form.STEPS,
        columns=16,
    ),
    Panel(
        "Role",
        "The role that the instance has; the same colour up to a change.",
        count("in the role"),
        NO_LIMIT,
        (Query(of("pdmux_role"), "{{role}}"),),
        Form.STEPS,
    ),
    Panel(
        "How steps share the device",
        "Steps a second by mode. AUTO chooses one of these for each step.",
        STEPS_PER_S,
        NO_LIMIT,
        rates_by("pdmux_mode_steps_total", "mode"),
        Form.STACK,
    ),
    Panel(
        "Why they share it so",
        "Steps a second by the reason of the mode. `best_effort`: no way keeps the token gaps by its bound.",
        STEPS_PER_S,
        NO_LIMIT,
        rates_by("pdmux_mode_choices_total", "reason"),
        Form.STACK,
    ),
    Panel(
        "What steps do",
        "Steps a second by why the policy made them up so. `preempt` and `decode_no_pages`: too few pages.",
        STEPS_PER_S,
        NO_LIMIT,
        rates_by("pdmux_steps_total", "reason"),
        Form.STACK,
    ),
)

TIMES = (
    Panel(
        "Time of steps: p99, measured and predicted",
        "By kind of work. Both are of the same steps over the same buckets.",
        SECONDS,
        NO_LIMIT,
        (
            Query(quantile(0.99, "pdmux_step_seconds", by="kind"), "{{kind}}"),
            Query(quantile(0.99, "pdmux_predicted_step_seconds", by="kind"), "{{kind}}, predicted", dashed=True),
        ),
    ),
    Panel(
        "Time of steps: mean, measured and predicted",
        "By kind of work, exact.",
        SECONDS,
        NO_LIMIT,
        (
            Query(mean("pdmux_step_seconds", by="kind"), "{{kind}}"),
            Query(mean("pdmux_predicted_step_seconds", by="kind"), "{{kind}}, predicted", dashed=True),
        ),
    ),
    Panel(
        "Times above their bound",
        "Share of times above the 99 % bound that objectives are kept by. One in a hundred is what the bound means.",
        SHARE,
        warns_from(0.02, bad=0.05),
        (Query(share("pdmux_exceeded_bounds_total", "pdmux_predicted_times_total"), "above"),),
    ),
    Panel(
        "Width of the guard",
        "The 99 % bound over the prediction, of the last steps: what certainty costs.",
        count("bound / prediction"),
        warns_from(2, bad=4),
        (Query(of("pdmux_guard_factor"), "guard"),),
    ),
    Panel(
        "Correction of the profile",
        "Measured over predicted by the profile: of the kind of work furthest from it, and of each kind alone on the device.",
        count("measured / predicted"),
        warns_from(1.5, bad=3),
        (
            Query(of("pdmux_correction_factor"), "furthest"),
            Query(of("pdmux_prediction_factor"), "{{kind}}"),
            Query(of("pdmux_bound_factor"), "{{kind}}, bound"),
        ),
    ),
    Panel(
        "Kinds of work that drift",
        "Their times have moved away from the profile. At 0 it fits.",
        count("kinds"),
        warns_from(1, bad=3),
        (Query(of("pdmux_drifting_cells"), "drifting"),),
    ),
)

WORK = (
    Panel(
        "Requests",
        "That decode, that hold pages, and that wait for pages.",
        count("requests"),
        NO_LIMIT,
        (
            Query(of("pdmux_instance_decoding_requests"), "decode"),
            Query(of("pdmux_instance_running_requests"), "hold pages"),
            Query(of("pdmux_instance_waiting_requests"), "wait"),
        ),
    ),
    QUEUE_AGE,
    Panel(
        "Tokens to be prefilled, and in decodes",
        "Of requests that wait or have begun, and the contexts of those that decode.",
        count("tokens"),
        NO_LIMIT,
        (
            Query(of("pdmux_instance_queued_prefill_tokens"), "to be prefilled"),
            Query(of("pdmux_instance_decode_context_tokens"), "in decodes"),
        ),
    ),
    Panel(
        "Tokens computed",
        "A second: by prefills, by decodes, thrown away after the end of a request, and not computed because the prefix cache "
        "had them.",
        count("tokens/s"),
        NO_LIMIT,
        (
            Query(rate("pdmux_prefill_tokens_total"), "prefill"),
            Query(rate("pdmux_engine_generated_tokens_total"), "generated"),
            Query(rate("pdmux_wasted_tokens_total"), "wasted"),
            Query(rate("pdmux_prefix_hit_tokens_total"), "from the prefix cache"),
        ),
    ),
    Panel(
        "Bursts",
        "A second, by why the device is given so many decode steps at once.",
        count("bursts/s"),
        NO_LIMIT,
        rates_by("pdmux_bursts_total", "reason"),
        Form.STACK,
    ),
    Panel(
        "Admissions and ends",
        "Requests a second that were judged by when their first token would come, and engine requests by why they ended.",
        count("requests/s"),
        NO_LIMIT,
        (*rates_by("pdmux_admissions_total", "reason"), *rates_by("pdmux_engine_finished_total", "reason")),
    ),
)

MEMORY = (
    Panel(
        "KV pages by owner",
        "Free, cached, held by requests, leased to a transfer that reads them, in quarantine. They add up to the pool.",
        count("pages"),
        NO_LIMIT,
        (Query(of("pdmux_pages"), "{{owner}}"),),
        Form.STEPS,
    ),
    Panel(
        "Preemptions and evictions",
        "A second: requests that lost their pages to older ones and are computed anew, and cached pages that were given up.",
        count("events/s"),
        NO_LIMIT,
        (Query(rate("pdmux_preemptions_total"), "preemptions"), Query(rate("pdmux_page_evictions_total"), "evictions")),
    ),
    Panel(
        "Step under way",
        "How long it had taken when it was looked at. Near the stall timeout the instance counts as unhealthy.",
        SECONDS,
        bad_from(10),
        (Query(of("pdmux_instance_step_age_seconds"), "step under way"),),
    ),
)

DASHBOARD = Dashboard(
    "instance",
    "One instance",
    "What does one instance do with its device, and does it do it as predicted?",
    (
        Row("Lanes and splits", LANES),
        Row("Predicted and measured", TIMES),
        Row("Work", WORK),
        Row("Memory", MEMORY),
    ),
    one_instance=True,
)
