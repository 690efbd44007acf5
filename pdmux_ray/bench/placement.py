"""What the placement controller is worth, on a load that turns from long prompts to long answers; and that it moves nothing
without a reason.

    python -m pdmux_ray.bench.placement [--simulate] [--seconds N] [--constant N] [--source direct|prometheus] [--out DIR]

The same requests go to the same four instances, once with the controller and once with each ratio that stays: simulated, and
(but for --simulate) through servers on this machine, whose devices keep the time of a GPU. Then a load that stays comes for
--constant seconds, and one that turns while its Prometheus is stopped: neither may change a role. Exit status 1 when anything
of that does not hold. `bench.placement_fleet` has the fleet, the load and the SLO.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from pdmux_ray.bench import placement_page
from pdmux_ray.bench.load.client import Target
from pdmux_ray.bench.load.generator import Load, Options, open_loop
from pdmux_ray.bench.load.generator import run as run_loop
from pdmux_ray.bench.placement_fleet import (
    ALL_MUX,
    LONG_IN,
    LONG_OUT,
    PLACED,
    SLO,
    STATIC,
    Outcome,
    Sample,
    Setting,
    planned,
    simulated,
)
from pdmux_ray.bench.prometheus_server import PrometheusServer, scraping
from pdmux_ray.bench.server import free_port, running
from pdmux_ray.config import IMPORT_PATH
from pdmux_ray.report import figures
from pdmux_ray.report.page import Row, Table
from pdmux_ray.workload.requests import PlannedRequest

FLIP_S = 30.0  # within which a role changes after the load has turned
TIMES = 1.3  # the goodput of the better ratio that stays
POLL_S = 0.5
DRAIN_S = 30.0  # after the last arrival
WARM_S = 40.0  # with Prometheus, before it is stopped
COLUMNS = ("setting", "good", "of", "failed", "good requests/s", "first change after the turn, s", "changes at, s")


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that must hold, and what was found."""

    words: str
    found: str
    holds: bool


class Watch(threading.Thread):
    """Notes the roles of a server's instances, and stops its Prometheus at `stop_s` of the run."""

    def __init__(self, url: str, prometheus: PrometheusServer | None = None, stop_s: float | None = None) -> None:
        super().__init__(daemon=True)
        self.samples: list[tuple[float, int, int]] = []  # (perf_counter, prefill, others)
        self._url = url
        self._prometheus = prometheus
        self._stop_s = stop_s
        self._begin_s = time.perf_counter()
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(POLL_S):
            with contextlib.suppress(OSError):  # a busy server may answer late
                roles = [each["role"] for each in json.loads(get(f"{self._url}/admin/instances"))["instances"]]
                self.samples.append((time.perf_counter(), roles.count("prefill"), len(roles) - roles.count("prefill")))
            if self._prometheus and self._stop_s is not None and time.perf_counter() - self._begin_s > self._stop_s:
                self._prometheus.stop()

    def end(self) -> None:
        self._ended.set()
        self.join()


def get(url: str) -> bytes:
    """Raises OSError."""
    with urllib.request.urlopen(url, timeout=10) as reply:
        body: bytes = reply.read()
        return body


def controller_figures(url: str) -> dict[str, float]:
    """What the server's placement controller exports, by series."""
    (target,) = (each for each in json.loads(get(f"{url}/metrics/targets")) if each["labels"]["component"] == "controller")
    text = get(f"http://{target['targets'][0]}/metrics").decode()
    return {name: float(value) for name, value in re.findall(r"^(pdmux_placement\S*) (\S+)$", text, re.MULTILINE)}


def served(
    setting: Setting, requests: Sequence[PlannedRequest], from_prometheus: bool, stop_s: float | None = None
) -> tuple[Outcome, dict[str, float], Load]:
    """The requests through a server of that setting. `stop_s`: of the run, when its Prometheus is stopped. With the figures of
    its controller at the end, if it has one. Raises PdmuxError."""
    port = free_port() if from_prometheus and setting.placed else None
    args = setting.args(f"http://127.0.0.1:{port}" if port else None)
    with tempfile.TemporaryDirectory(prefix="placement-") as folder, ExitStack() as stack:
        config = Path(folder) / "serve.yaml"
        config.write_text(yaml.safe_dump(_document(args)), encoding="utf-8")
        command = f"{sys.executable} -m pdmux_ray.serve.launch {config} --port {{port}}"
        server = stack.enter_context(running(command, "demo"))
        prometheus = stack.enter_context(scraping(server.url, port)) if port else None
        if prometheus is not None:
            time.sleep(WARM_S / 4)  # a few scrapes, for the first rates
        watch = Watch(server.url, prometheus, stop_s)
        watch.start()
        load = run_loop(open_loop(Target(server.url, "demo"), requests, Options(drain_s=DRAIN_S), _no_progress))
        watch.end()
        told = controller_figures(server.url) if setting.placed else {}
    roles = [Sample(at - load.start_s, prefill, others) for at, prefill, others in watch.samples]
    return Outcome(setting, load.lifelines, load.start_s, roles), told, load


def _no_progress(sent: int, done: int, all_: int) -> None: ...


def _document(args: dict[str, Any]) -> dict[str, Any]:
    application = {"name": "pdmux", "route_prefix": "/", "import_path": IMPORT_PATH, "args": args}
    return {"proxy_location": "HeadOnly", "http_options": {"host": "127.0.0.1"}, "applications": [application]}


def compared(outcomes: Sequence[Outcome], turn_s: float) -> list[Claim]:
    """What must hold of one load with the controller and with ratios that stay."""
    ours = next(each for each in outcomes if each.setting.placed)
    best = max((each for each in outcomes if each.setting in STATIC), key=lambda each: each.good)
    flips = ours.flips(turn_s)
    first_s = flips[0] - turn_s if flips else None
    ratio = ours.good / max(best.good, 1)
    return [
        Claim(f"a role changes within {FLIP_S:g} s of the turn", _seconds(first_s), first_s is not None and first_s <= FLIP_S),
        Claim("no request fails", f"{ours.failed} of {len(ours.lifelines)}", ours.failed == 0),
        Claim(f"goodput ≥ {TIMES:g} × the better ratio that stays ({best.setting.name})", f"{ratio:.2f}", ratio >= TIMES),
    ]


def still(words: str, outcome: Outcome, after_s: float = 0.0) -> Claim:
    """That no role changed, of a run in which roles were seen."""
    flips, seen = outcome.flips(after_s), outcome.roles
    found = f"{len(flips)} changes in {len(seen)} looks, {outcome.failed} failed requests"
    return Claim(words, found, bool(seen) and not flips and not outcome.failed)


def table(caption: str, outcomes: Sequence[Outcome], turn_s: float) -> Table:
    """An outcome a row. `turn_s`: of the run, when the load turns."""
    rows = []
    for each in outcomes:
        flips = each.flips()
        after = [at - turn_s for at in flips if at >= turn_s]
        span_s = max(life.due_s for life in each.lifelines) - each.begin_s
        counts = [str(each.good), str(len(each.lifelines)), str(each.failed), f"{each.good / span_s:.2f}"]
        times = [_seconds(after[0] if after else None), ", ".join(f"{at:.0f}" for at in flips) or figures.NONE]
        rows.append(Row([each.setting.name, *counts, *times]))
    return Table(caption, COLUMNS, rows)


def claims_table(claims: Sequence[Claim]) -> Table:
    rows = [Row([claim.words, claim.found, "holds" if claim.holds else "does not hold"]) for claim in claims]
    return Table("What must hold", ("claim", "found", ""), rows, style="words")


def _seconds(seconds: float | None) -> str:
    return figures.NONE if seconds is None else f"{seconds:.1f}"


def lines(shown: Table) -> list[str]:
    """Markdown."""
    rows = [shown.columns, ["---"] * len(shown.columns), *(row.cells for row in shown.rows)]
    return [f"{shown.caption}:", "", *(f"| {' | '.join(cells)} |" for cells in rows), ""]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pdmux_ray.bench.placement", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--simulate", action="store_true", help="without servers")
    parser.add_argument("--seconds", type=float, default=120.0, help="of each of the two phases; default 120")
    parser.add_argument("--constant", type=float, default=600.0, help="seconds of the load that stays; 0: none; default 600")
    parser.add_argument("--source", choices=("direct", "prometheus"), default="prometheus", help="of the controller's figures")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("placement"), metavar="DIR", help="default: placement")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args, out = parser().parse_args(argv), Console(soft_wrap=True)
    args.out.mkdir(parents=True, exist_ok=True)
    requests = planned([(LONG_IN, args.seconds), (LONG_OUT, args.seconds)], args.seed)
    settings = (PLACED, *STATIC)
    held = []
    found = [simulated(each, requests, args.seed, DRAIN_S) for each in (*settings, ALL_MUX)]
    held += _conclude(args.out / "simulated", "Simulated", found, args.seconds, out, _simulated_constant(args))
    if not args.simulate:
        prometheus = args.source == "prometheus"
        live = []
        for setting in settings:
            outcome, _, load = served(setting, requests, prometheus)
            live.append(outcome)
            note = f" (the client: {load.invalid})" if load.invalid else ""
            out.print(f"{setting.name}: {outcome.good} of {len(outcome.lifelines)} good, {outcome.failed} failed{note}")
        others = [*_live_constant(args, prometheus), *([_stopped(args)] if prometheus else [])]
        held += _conclude(args.out / "served", "Served", live, args.seconds, out, others)
    return 0 if all(claim.holds for claim in held) else 1


def _simulated_constant(args: argparse.Namespace) -> list[Claim]:
    claims = []
    for phase in (LONG_IN, LONG_OUT) if args.constant else ():
        requests = planned([(phase, args.constant)], args.seed)
        outcome = simulated(_at_home(phase is LONG_IN), requests, args.seed, DRAIN_S)
        claims.append(still(f"{phase.name}, for {args.constant:g} s: no change", outcome))
    return claims


def _at_home(long_in: bool) -> Setting:
    """In the ratio that the phase wants."""
    return replace(PLACED, prefill=3 if long_in else 1)


def _live_constant(args: argparse.Namespace, prometheus: bool) -> list[Claim]:
    if not args.constant:
        return []
    outcome, _, _ = served(PLACED, planned([(LONG_IN, args.constant)], args.seed), prometheus)
    return [still(f"{LONG_IN.name}, for {args.constant:g} s: no change", outcome)]


def _stopped(args: argparse.Namespace) -> Claim:
    requests = planned([(LONG_IN, WARM_S), (LONG_OUT, 1.5 * WARM_S)], args.seed)
    outcome, told, _ = served(PLACED, requests, True, stop_s=WARM_S - 10)
    stale, age_s = told.get("pdmux_placement_stale", 0.0), told.get("pdmux_placement_age_seconds", 0.0)
    claim = still("Prometheus stopped, then the load turns: no change, and pdmux_placement_stale is 1", outcome)
    found = f"{claim.found}; stale {stale:g}, age {age_s:.0f} s"
    return replace(claim, found=found, holds=claim.holds and stale == 1.0)


def _conclude(
    path: Path, caption: str, found: Sequence[Outcome], turn_s: float, out: Console, others: Sequence[Claim]
) -> list[Claim]:
    """Prints the tables and writes them with the picture."""
    held = [*compared(found, turn_s), *others]
    tables = [table(caption, found, turn_s), claims_table(held)]
    text = "\n".join(line for shown in tables for line in lines(shown))
    lead = f"SLO: {figures.slo(SLO)}. The load turns after {turn_s:g} s."
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    path.with_suffix(".html").write_text(placement_page.page(found, turn_s, tables, lead), encoding="utf-8")
    out.print(text)
    return held


if __name__ == "__main__":
    sys.exit(main())
