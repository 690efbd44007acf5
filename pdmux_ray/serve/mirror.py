"""Some of a replica's figures once more through Ray, for its own dashboard. There they are older, by `PERIOD_S` and by Ray's
export period; what decides or alerts looks at the replica's port (`scrape_port`).

All are gauges, totals, too: what Ray's agent has counted of a process it exports as long as the node lives, while gauges of one
that has ended vanish. And no histograms, of which Ray makes sums up.
"""

from __future__ import annotations

import asyncio
import logging

from prometheus_client.registry import Collector
from ray.serve import metrics

from pdmux_ray.metrics.catalog import CATALOG

PERIOD_S = 5.0

OF_GATEWAY = (
    "pdmux_open_requests",
    "pdmux_prompt_tokens_total",
    "pdmux_cached_prompt_tokens_total",
    "pdmux_generated_tokens_total",
)
OF_INSTANCE = (
    "pdmux_instance_running_requests",
    "pdmux_instance_waiting_requests",
    "pdmux_instance_decoding_requests",
    "pdmux_instance_queued_prefill_tokens",
    "pdmux_instance_free_pages",
    "pdmux_oldest_waiting_seconds",
)

log = logging.getLogger("ray.serve")


class Mirror:
    """Owner: the replica's event loop. `names`: metrics without labels. Ray exports them as `ray_NAME`, a total without its
    ending, with the labels that it gives every figure of a replica."""

    def __init__(self, registry: Collector, names: tuple[str, ...]) -> None:
        self._registry = registry
        self._gauges = {name: metrics.Gauge(name.removesuffix("_total"), CATALOG[name].meaning) for name in names}
        self._trouble: str | None = None  # that the log has last
        self._task = asyncio.get_running_loop().create_task(self._run())

    def close(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            trouble = None
            try:
                self._copy()
            except Exception as error:  # of whatever tells a figure: the next time it may do so again
                trouble = repr(error)
            if trouble is not None and trouble != self._trouble:
                log.warning("Figures for Ray's dashboard are missing: %s", trouble)
            self._trouble = trouble
            await asyncio.sleep(PERIOD_S)

    def _copy(self) -> None:
        """As they are now. Raises what the registry raises."""
        for family in self._registry.collect():
            for sample in family.samples:
                if sample.name in self._gauges:
                    self._gauges[sample.name].set(sample.value)
