"""Which roles do the instances have, which should they have, and why?"""

from __future__ import annotations

from pdmux_ray.metrics.dashboards.panel import (
    NO_LIMIT,
    SECONDS,
    Dashboard,
    Form,
    Panel,
    Query,
    Row,
    bad_from,
    count,
    warns_from,
)
from pdmux_ray.metrics.dashboards.queries import APP, ROLE, of, rates_by, total
from pdmux_ray.metrics.dashboards.shared import (
    ATTAINMENT_OVER_TIME,
    DECODING_BY_ROLE,
    QUEUED_BY_ROLE,
    ROLE_CHANGES,
)

INSTANCES = count("instances")

_THERE = total("pdmux_placement_instances", 'state="observed"', by="app", where=APP)


def _of_state(title: str, state: str, description: str) -> Panel:
    query = of("pdmux_placement_instances", f'state="{state}"', where=ROLE)
    return Panel(title, description, INSTANCES, NO_LIMIT, (Query(query, "{{role}}"),), Form.STEPS)


PLAN = (
    _of_state("Planned", "planned", "Instances by role, as the policy would have it now."),
    _of_state("Requested", "requested", "Instances by role, as they were asked to be. In a dry run nobody is asked."),
    _of_state("Observed", "observed", "Instances by role, as they are."),
    Panel(
        "Decisions",
        "A second, by reason: why roles were changed or left as they are.",
        count("decisions/s"),
        NO_LIMIT,
        rates_by("pdmux_placement_decisions_total", "reason", APP),
        Form.STACK,
    ),
    Panel(
        "Age of the figures",
        "Of the newest that the controller decides by.",
        SECONDS,
        warns_from(15, bad=60),
        (Query(of("pdmux_placement_age_seconds", where=APP), "age"),),
    ),
    Panel(
        "Figures are stale",
        "At 1 the controller has none that are fresh, and changes nothing.",
        count("stale"),
        bad_from(1),
        (Query(of("pdmux_placement_stale", where=APP), "stale"),),
    ),
)

FIGURES = (
    Panel(
        "What each phase wants",
        "Instances that prefills and decodes would keep busy all the time, as the controller works it out from the load.",
        INSTANCES,
        NO_LIMIT,
        (Query(of("pdmux_placement_demand", where=APP), "{{phase}}"),),
        Form.STACK,
    ),
    QUEUED_BY_ROLE,
    DECODING_BY_ROLE,
)

RESULT = (
    ROLE_CHANGES,
    Panel(
        "Number of instances",
        "That there are, and that there should be. Where their number is not the controller's, both are the same.",
        INSTANCES,
        NO_LIMIT,
        (
            Query(_THERE, "there are"),
            Query(f"{total('pdmux_placement_replicas', by='app', where=APP)} or {_THERE}", "wanted", dashed=True),
        ),
    ),
    ATTAINMENT_OVER_TIME,
)

DASHBOARD = Dashboard(
    "placement",
    "Placement and ratio",
    "Which roles do the instances have, which should they have, and why?",
    (Row("The controller", PLAN), Row("What it goes by", FIGURES), Row("What came of it", RESULT)),
)
