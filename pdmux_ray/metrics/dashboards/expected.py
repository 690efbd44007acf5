"""What a fleet is expected to do at the highest load that it should carry, as thresholds of the dashboards' panels.

`pdmux tune` writes it; `pdmux dashboards --expected FILE` takes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pdmux_ray.errors import ConfigError
from pdmux_ray.metrics.dashboards.panel import Dashboard, Thresholds, bad_below, warns_from

NEAR = 0.9  # of the goodput: offered load that warns


@dataclass(frozen=True, slots=True)
class Expected:
    """Latencies: of all requests, at the highest rate that held. None: no such objective, or no sample."""

    configuration: str  # in words
    goodput_rps: float  # of the whole fleet
    attainment: float
    ttft_p99_s: float | None
    itl_p99_s: float | None
    ttft_limit_s: float | None  # of an empty prompt, where longer ones are given longer
    itl_limit_s: float | None

    def thresholds(self) -> dict[str, Thresholds]:
        """By the title of a panel."""
        attainment = bad_below(self.attainment, fine=(1 + self.attainment) / 2)
        found = dict.fromkeys(("SLO attainment", "SLO attainment, 5 minutes", "SLO attainment, 1 hour"), attainment)
        found["Offered requests"] = warns_from(NEAR * self.goodput_rps, bad=self.goodput_rps)
        if self.ttft_p99_s is not None:
            found["Time to first token"] = _later_than(self.ttft_p99_s, self.ttft_limit_s)
        if self.itl_p99_s is not None:
            found["Inter-token latency"] = _later_than(self.itl_p99_s, self.itl_limit_s)
        return found


def _later_than(expected_s: float, limit_s: float | None) -> Thresholds:
    """A warning from what is expected on, bad from the objective on, where that is more."""
    return warns_from(expected_s, bad=limit_s if limit_s is not None and limit_s > expected_s else None)


def expecting(dashboard: Dashboard, expected: Expected | None) -> Dashboard:
    """With its thresholds, on the panels that it has any for."""
    found: Mapping[str, Thresholds] = expected.thresholds() if expected else {}
    rows = [
        replace(row, panels=tuple(replace(panel, thresholds=found.get(panel.title, panel.thresholds)) for panel in row.panels))
        for row in dashboard.rows
    ]
    return replace(dashboard, rows=tuple(rows))


def text(expected: Expected) -> str:
    """As a file."""
    return json.dumps(asdict(expected), indent=1, allow_nan=False) + "\n"


def read(path: Path) -> Expected:
    """Raises ConfigError."""
    try:
        return Expected(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"--expected {path}: {error}. Give the expected.json that `pdmux tune` wrote.") from None
