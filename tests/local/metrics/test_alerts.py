"""Each alert fires on a made-up history that is bad, and not on one that is good, as Prometheus' own promtool plays it.

Needs Debian's package `prometheus`.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pdmux_ray.bench.prometheus_server import RULES, tool
from pdmux_ray.metrics.rules import ALERTS

NAMES = sorted({alert.name for alert in ALERTS})
OF_ONE = {"app": "shop", "model": "llama", "instance": "i1", "component": "instance"}
OF_A_GATEWAY = {**OF_ONE, "instance": "g1", "component": "gateway"}


@dataclass(frozen=True)
class Firing:
    """An alert as it is told: `labels` beside its severity, `value` as its description has it."""

    name: str
    severity: str
    labels: Mapping[str, str]
    value: str = ""

    def expected(self) -> dict[str, Any]:
        (alert,) = (each for each in ALERTS if (each.name, each.severity) == (self.name, self.severity))
        annotations = alert.document()["annotations"]
        return {
            "exp_labels": {**self.labels, "severity": self.severity},
            "exp_annotations": {name: self._filled(text) for name, text in annotations.items()},
        }

    def _filled(self, text: str) -> str:
        text = re.sub(r"{{ \$labels\.(\w+) }}", lambda found: self.labels[found[1]], text)
        return re.sub(r"{{ \$value.*?}}", self.value, text)


@dataclass(frozen=True)
class History:
    """`series`: (name, labels, values a minute in promtool's notation). `at`: (after so long, what fires then)."""

    series: Sequence[tuple[str, Mapping[str, str], str]]
    at: Sequence[tuple[str, Sequence[Firing]]]

    def document(self) -> dict[str, Any]:
        return {
            "interval": "1m",
            "input_series": [{"series": _written(name, labels), "values": values} for name, labels, values in self.series],
            "alert_rule_test": [
                {"eval_time": at, "alertname": name, "exp_alerts": [each.expected() for each in firing if each.name == name]}
                for at, firing in self.at
                for name in NAMES
            ],
        }


def _written(name: str, labels: Mapping[str, str]) -> str:
    return name + "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}"


def requests(good: str, late: str) -> list[tuple[str, Mapping[str, str], str]]:
    """Of two gateways' counters by verdict; the second one's stand still."""
    found: list[tuple[str, Mapping[str, str], str]] = []
    for verdict, values in (("good", good), ("ttft", late)):
        labels = {"tier": "default", "verdict": verdict}
        found.append(("pdmux_slo_requests_total", OF_A_GATEWAY | labels, values))
        found.append(("pdmux_slo_requests_total", OF_A_GATEWAY | labels | {"instance": "g2"}, "0x120"))
    return found


def burning(severity: str, good: str) -> Firing:
    return Firing("SloBurnRate", severity, {"app": "shop", "model": "llama", "tier": "default"}, good)


def instance(name: str, values: str, **labels: str) -> tuple[str, Mapping[str, str], str]:
    return name, OF_ONE | labels, values


def fires(name: str, severity: str, value: str = "", **labels: str) -> Firing:
    return Firing(name, severity, OF_ONE | labels, value)


LEAKED = fires("KvPagesLeaked", "ticket", "7", owner="held")
DRIFT = fires("PredictionDrift", "ticket", "2")
FENCED = Firing("HandoffsFenced", "ticket", {"app": "shop", "instance": "i1", "reason": "stale"}, "3")
STARVED = fires("PrefillStarved", "page", "45s")
STALE = fires("PlacementStale", "ticket", component="controller", instance="p1")

BAD = {
    "most requests are late": History(requests("0+10x120", "0+10x120"), [("10m", [burning("page", "50%")])]),
    "one in five is late, for long": History(
        requests("0+80x120", "0+20x120"), [("10m", []), ("30m", [burning("ticket", "80%")])]
    ),
    "pages are held for nobody": History(
        [
            instance("pdmux_pages", "0 0 7x30", owner="held"),
            instance("pdmux_instance_running_requests", "0x30"),
            instance("pdmux_instance_waiting_requests", "0x30"),
        ],
        [("3m", []), ("5m", [LEAKED])],
    ),
    "times have moved away from the profile": History(
        [instance("pdmux_drifting_cells", "2x30")], [("9m", []), ("11m", [DRIFT])]
    ),
    "a peer of another start": History(
        [instance("pdmux_kv_fenced_total", "0x15 3x30", reason="stale")], [("14m", []), ("20m", [FENCED]), ("40m", [])]
    ),
    "nobody prefills": History([instance("pdmux_oldest_waiting_seconds", "0 45x30")], [("1m", []), ("3m", [STARVED])]),
    "half of the KV is computed again": History(
        [
            instance("pdmux_kv_received_tokens_total", "0+1000x60"),
            instance("pdmux_kv_used_tokens_total", "0+500x60"),
        ],
        [("8m", []), ("25m", [Firing("KvRecomputed", "ticket", {"app": "shop"})])],
    ),
    "the controller has no figures": History(
        [instance("pdmux_placement_stale", "0 1x30", component="controller", instance="p1")], [("1m", []), ("3m", [STALE])]
    ),
    "an instance does not answer": History(
        [("up", OF_ONE | {"job": "pdmux"}, "1 0x30")], [("1m", []), ("3m", [fires("InstanceDown", "page", job="pdmux")])]
    ),
    "a gateway is linked to too few": History(
        [("pdmux_linked_instances", OF_A_GATEWAY, "3x30"), ("pdmux_expected_instances", OF_A_GATEWAY, "4x30")],
        [("0m", []), ("2m", [Firing("InstanceDown", "page", OF_A_GATEWAY)])],
    ),
}
GOOD = History(
    [
        *requests("0+95x120", "0+5x120"),
        instance("pdmux_pages", "7x120", owner="held"),
        instance("pdmux_instance_running_requests", "1x120"),
        instance("pdmux_instance_waiting_requests", "0x120"),
        instance("pdmux_drifting_cells", "0x120"),
        instance("pdmux_kv_fenced_total", "3x120", reason="stale"),
        instance("pdmux_oldest_waiting_seconds", "20x120"),
        instance("pdmux_kv_received_tokens_total", "0+1000x120"),
        instance("pdmux_kv_used_tokens_total", "0+950x120"),
        instance("pdmux_placement_stale", "0x120", component="controller", instance="p1"),
        ("up", OF_ONE, "1x120"),
        ("pdmux_linked_instances", OF_A_GATEWAY, "4x120"),
        ("pdmux_expected_instances", OF_A_GATEWAY, "4x120"),
    ],
    [("10m", []), ("30m", []), ("2h", [])],
)


def played(folder: Path, histories: Sequence[History]) -> subprocess.CompletedProcess[str]:
    document = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [history.document() for history in histories],
    }
    (path := folder / "alerts.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    return subprocess.run([tool("promtool"), "test", "rules", str(path)], capture_output=True, text=True)


def test_each_alert_has_a_history_in_which_it_fires() -> None:
    fired = {(each.name, each.severity) for history in BAD.values() for _, firing in history.at for each in firing}
    assert fired == {(alert.name, alert.severity) for alert in ALERTS}


def test_alerts_fire_when_it_is_bad_for_so_long_and_no_others_with_them(tmp_path: Path) -> None:
    done = played(tmp_path, list(BAD.values()))
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_alert_fires_while_all_is_well(tmp_path: Path) -> None:
    done = played(tmp_path, [GOOD])
    assert done.returncode == 0, done.stdout + done.stderr


def test_one_that_does_not_fire_would_be_found(tmp_path: Path) -> None:
    done = played(tmp_path, [History(requests("0+10x120", "0x120"), [("10m", [burning("page", "50%")])])])
    assert done.returncode != 0
    assert "SloBurnRate" in done.stdout + done.stderr
