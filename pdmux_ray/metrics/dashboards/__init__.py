"""The dashboards as data, one module each."""

from __future__ import annotations

from collections.abc import Mapping

from pdmux_ray.metrics.dashboards import capacity, instance, kv_transfer, placement, slo_overview
from pdmux_ray.metrics.dashboards.panel import Dashboard

DASHBOARDS: Mapping[str, Dashboard] = {
    module.DASHBOARD.name: module.DASHBOARD for module in (slo_overview, instance, kv_transfer, placement, capacity)
}
