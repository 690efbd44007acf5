"""`pdmux dashboards`: writes the dashboards for Grafana and the rules for Prometheus, or draws a dashboard without Grafana."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pdmux_ray.errors import ConfigError
from pdmux_ray.metrics.dashboards import DASHBOARDS
from pdmux_ray.metrics.dashboards.answers import WINDOW_S, Span, answers, choices
from pdmux_ray.metrics.dashboards.expected import Expected, expecting, read
from pdmux_ray.metrics.dashboards.variables import VARIABLES

FOLDER = Path("dashboards")
RULES = "rules.yaml"  # for a Prometheus server
OPERATOR_RULES = "prometheusrule.yaml"  # the same, as the Prometheus operator of Kubernetes takes them
SPAN_S = 1800.0
FORMS = (".html", ".png")


def add_dashboards(parser: argparse.ArgumentParser) -> None:
    """Its arguments. What they ask for is `run` of the namespace: an exit status; it raises PdmuxError, OSError."""
    parser.description = (
        "Writes the Grafana dashboards and the Prometheus rules to a folder, says whether those in it agree, or draws a "
        "dashboard from what a Prometheus server has, without Grafana; docs/dashboards.md."
    )
    parser.add_argument(
        "--out", type=Path, metavar="PATH", help=f"a folder, default {FOLDER}/; with --render a file, .html or .png"
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="write nothing: exit code 1 when a file does not agree")
    action.add_argument("--render", metavar="URL", help="draw from this Prometheus server, such as http://127.0.0.1:9090")
    text = "what `pdmux tune` expects of the fleet (its expected.json), as thresholds of panels"
    parser.add_argument("--expected", type=Path, metavar="FILE", help=text)
    drawn = parser.add_argument_group("with --render")
    drawn.add_argument("--dashboard", choices=list(DASHBOARDS), default="slo_overview", help="default slo_overview")
    drawn.add_argument("--seconds", type=_seconds, default=SPAN_S, metavar="S", help=f"how far back; default {SPAN_S:g}")
    text = f"that rates are over, at least four scrapes; default {WINDOW_S:g}"
    drawn.add_argument("--window", type=_seconds, default=WINDOW_S, metavar="S", help=text)
    for variable in VARIABLES:
        text = "a regular expression; default: every one"
        drawn.add_argument(f"--{variable.name}", metavar="NAME", help=text)
    parser.set_defaults(run=_run)


def _seconds(text: str) -> float:
    """Raises ValueError, which argparse tells."""
    seconds = float(text)
    if not 1 <= seconds < math.inf:
        raise ValueError
    return seconds


def _run(args: argparse.Namespace) -> int:
    expected = read(args.expected) if args.expected else None
    if args.render is not None:
        return _render(args, expected)
    folder = args.out or FOLDER
    return _check(folder, expected) if args.check else write(folder, expected)


def _files(expected: Expected | None) -> Iterator[tuple[str, str]]:
    """(name, text) of all that is generated."""
    import yaml

    from pdmux_ray.metrics.dashboards.grafana import text
    from pdmux_ray.metrics.rules import rules, rules_yaml

    for name, dashboard in DASHBOARDS.items():
        yield f"{name}.json", text(expecting(dashboard, expected))
    yield RULES, rules_yaml()
    yield OPERATOR_RULES, yaml.safe_dump(_operator_rules(rules()), sort_keys=False, width=128)


def _operator_rules(rules: Mapping[str, Any]) -> dict[str, Any]:
    metadata = {"name": "pdmux", "labels": {"app.kubernetes.io/name": "pdmux-ray"}}
    return {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule", "metadata": metadata, "spec": dict(rules)}


def write(folder: Path, expected: Expected | None) -> int:
    """All files. Raises OSError."""
    from pdmux_ray.metrics.summary import write_whole

    for name, text in _files(expected):
        write_whole(folder / name, text)
    print(f"{len(DASHBOARDS)} dashboards, {RULES} and {OPERATOR_RULES} are in {folder}")
    return 0


def _check(folder: Path, expected: Expected | None) -> int:
    wrong = [name for name, text in _files(expected) if not _agrees(folder / name, text)]
    if wrong:
        print(f"not what the code makes: {', '.join(wrong)} in {folder}. Run `pdmux dashboards --out {folder}`.")
    return 1 if wrong else 0


def _agrees(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


def _render(args: argparse.Namespace, expected: Expected | None) -> int:
    from pdmux_ray.metrics.prometheus import Prometheus
    from pdmux_ray.report import board

    if args.out is None or args.out.suffix not in FORMS:
        raise ConfigError(f"--render needs --out FILE that ends with {' or '.join(FORMS)}")
    dashboard, source, end_s = expecting(DASHBOARDS[args.dashboard], expected), Prometheus(args.render), time.time()
    span = Span(end_s - args.seconds, end_s, args.window)
    given = {v.name: value for v in VARIABLES if (value := getattr(args, v.name)) is not None}
    chosen = choices(source, dashboard, given, span)
    found = answers(source, dashboard, chosen, span)
    shown = ", ".join(f"{name} {value}" for name, value in chosen.items())
    lead = f"{args.seconds:g} s up to {datetime.fromtimestamp(end_s, UTC):%Y-%m-%d %H:%M:%S} UTC; {shown}."
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.out.suffix == ".png":
        args.out.write_bytes(board.picture(dashboard, found, span, lead))
    else:
        args.out.write_text(board.page(dashboard, found, span, lead), encoding="utf-8")
    empty = [panel.title for panel in dashboard.panels if not found[panel]]
    print(f"{len(dashboard.panels)} panels are in {args.out}" + (f"; without data: {', '.join(empty)}" if empty else ""))
    return 0
