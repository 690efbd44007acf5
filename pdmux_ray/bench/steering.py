"""Which way pays: one instance that prefills and one that decodes, a core each, where the router predicts, and where it follows
a rule that does not look.

    python -m pdmux_ray.bench.steering [--profile FILE] [--targets T,T,…] [--shares 0.8,1.2,2] [--out DIR] [--plot FILE.png]
    python -m pdmux_ray.bench.steering --simulated [--rates 50,60,70] [--targets T,T,…] [--out DIR]

Of ten requests nine are short prompts with longer answers, one is a long prompt with a short answer. Each policy gets a server
of its own on configs/1p1d.yaml, whose engines share their core by predicted time, and the same requests at the same times, at
each of the rates: shares of what an idle server that fetches nothing carries in a closed loop. Exit status 1 when predicting
does not carry more than each of the others, or something was not measured. With --simulated instead: two GPUs that prefill and
two that do both, on a virtual clock.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from pdmux_ray.bench import bound, claims, settings
from pdmux_ray.bench.cli import TOKEN_IDS
from pdmux_ray.bench.load.client import Target
from pdmux_ray.bench.load.offer import Offer
from pdmux_ray.bench.load.outcome import measured, write_report
from pdmux_ray.bench.load.session import Session
from pdmux_ray.bench.scaled_work import MAX_CONTEXT, SLO, Mixed, scaled
from pdmux_ray.bench.study import Extent, Shape, Study, measured_sessions, read_shares, reserve_all
from pdmux_ray.bench.study_tables import latencies
from pdmux_ray.errors import ConfigError, PdmuxError
from pdmux_ray.metrics.goodput import Slo
from pdmux_ray.model.source import resolve
from pdmux_ray.report import figures
from pdmux_ray.types import Role
from pdmux_ray.workload.lengths import PowerLaw
from pdmux_ray.workload.scaling import Scaling
from pdmux_ray.workload.shapes import STRATIFIED
from pdmux_ray.workload.shapes import Shape as Lengths
from pdmux_ray.workload.source import TokenWorkload

CONFIG = settings.ROOT / "configs" / "1p1d.yaml"
PREDICT = "predict"
YARDSTICK = "local, prefill_first"

# Name -> keys of `gateway.routing.` that it sets.
POLICIES = {
    PREDICT: ("policy=predict",),
    "local": ("policy=local",),
    "remote": ("policy=remote",),
    "threshold-128": ("policy=threshold", "threshold_tokens=128"),
    "threshold-512": ("policy=threshold", "threshold_tokens=512"),
}
WHAT = {
    PREDICT: "predicted",
    "local": "never fetched",
    "remote": "always fetched",
    "threshold-128": "fetched from 128 tokens on",
    "threshold-512": "fetched from 512 tokens on",
}
BEATS = 1.01  # times the other's goodput: more than none, and no claim of equals
EVERY = 10  # request is a long one
SHARES = (0.8, 1.2, 1.6, 2.1)  # engines that plan by time carry about twice what one core does in a closed loop
SECONDS, REQUESTS = 10.0, 30
LINKED_S = 60.0  # after a server's start; seconds are usual
RATES = (50.0, 60.0, 70.0, 80.0, 90.0)  # requests/s of the simulated fleet
COLOURS = ("#2a7f62", "#c8553d", "#3d6fb4", "#8c6bb1", "#b8860b")

LONG = Lengths(
    "long",
    ("Long prompts: a power law from 600 to 2,000 tokens with mean 1,300, answers of 8 to 32. They share nothing.", STRATIFIED),
    PowerLaw(600, 1300, 2000),
    PowerLaw(8, 16, 32),
)


@dataclass(slots=True)
class Routes:
    """What a server's gateway and instances have counted in all its runs, those before the first rate included."""

    by_reason: dict[str, float] = field(default_factory=dict)  # requests
    landed: float = 0.0  # requests whose KV was fetched, whole and in time
    predicted: float = 0.0  # requests with a predicted TTFT
    predicted_s: float = 0.0  # the sum of it
    begun: float = 0.0  # requests with a first token
    ttft_s: float = 0.0  # the sum of how long that took, as the gateway saw it

    def add(self, exposition: str) -> None:
        """`exposition`: Prometheus' text format."""
        histograms = {
            "pdmux_predicted_time_to_first_token_seconds_count": "predicted",
            "pdmux_predicted_time_to_first_token_seconds_sum": "predicted_s",
            "pdmux_time_to_first_token_seconds_count": "begun",
            "pdmux_time_to_first_token_seconds_sum": "ttft_s",
        }
        for sample in (sample for family in text_string_to_metric_families(exposition) for sample in family.samples):
            reason = sample.labels.get("reason", "")
            if sample.name == "pdmux_routed_requests_total":
                self.by_reason[reason] = self.by_reason.get(reason, 0.0) + sample.value
            elif sample.name == "pdmux_fetches_total" and reason == "landed":
                self.landed += sample.value
            elif (name := histograms.get(sample.name)) is not None:
                setattr(self, name, getattr(self, name) + sample.value)

    @property
    def cells(self) -> list[str]:
        """Requests, share fetched, reasons by share, TTFT as predicted and as it was (ms, means)."""
        total = sum(self.by_reason.values())
        reasons = sorted(self.by_reason.items(), key=lambda item: -item[1])
        words = ", ".join(f"{reason} {number / total:.0%}" for reason, number in reasons if number)
        means = ((self.predicted_s, self.predicted), (self.ttft_s, self.begun))
        times = [figures.ms(seconds / count) if count else figures.NONE for seconds, count in means]
        return [f"{total:.0f}", figures.percent(self.landed / total) if total else figures.NONE, words or figures.NONE, *times]


def routes_table(routes: Mapping[str, Routes]) -> list[str]:
    """In Markdown, a row for each policy."""
    lines = ["| policy | requests | fetched | reasons | TTFT as predicted, mean, ms | as it was |", "|---|---|---|---|---|---|"]
    return [*lines, *(f"| {WHAT[name]} | {' | '.join(each.cells)} |" for name, each in routes.items())]


def command(profile: Path | None, name: str, slo: Slo | None) -> str:
    """What starts the server of a policy, or the yardstick, with {model} and {port} left open."""
    words = [str(settings.SERVE), str(CONFIG), "--set", "model={model}", "--port", "{port}"]
    routing, engine = POLICIES.get(name, POLICIES["local"]), ["mode=prefill_first"]
    if name != YARDSTICK:
        engine = ["mode=auto", *(settings.objectives(slo) if slo else ())]
        engine += [f"multiplex.profile={profile.resolve()}"] if profile else []
    for setting in (*(f"gateway.routing.{each}" for each in routing), *(f"engine.{each}" for each in engine)):
        words += ["--set", setting]
    return shlex.join(words)


@contextmanager
def served(routes: dict[str, Routes], command: str, model: Path) -> Iterator[Target]:
    """The command's server, once its instances are linked; what it has counted is added to its command's `routes` at the end.
    Raises PdmuxError."""
    with settings.served(command, model) as target:
        until_s = time.monotonic() + LINKED_S
        while not linked(_read(f"{target.url}/admin/instances")):
            if time.monotonic() > until_s:
                raise PdmuxError(f"the instances of {target.url} are not linked after {LINKED_S:g} s")
            time.sleep(0.5)
        yield target
        routes.setdefault(command, Routes()).add(_read(f"{target.url}/metrics"))


def linked(listing: str) -> bool:
    """Whether every instance that decodes can fetch from every one that prefills."""
    instances = json.loads(listing)["instances"]
    prefill = {each["id"] for each in instances if each["role"] == Role.PREFILL.value}
    return all(prefill <= set(each["peers"]) for each in instances if each["id"] not in prefill)


def _read(url: str) -> str:
    """Raises PdmuxError."""
    try:
        with urlopen(url, timeout=10) as reply:
            text: str = reply.read().decode()
            return text
    except OSError as error:
        raise PdmuxError(f"{url} cannot be read: {error}") from None


def workload() -> Mixed:
    """Nine short ones and a long one in any order, and so on."""
    long = TokenWorkload(LONG, Scaling(max_context=MAX_CONTEXT), TOKEN_IDS)
    return Mixed(scaled("sharegpt"), long, EVERY, scattered=True)


def found_claims(sessions: Mapping[str, Session]) -> list[claims.Claim]:
    """That predicting carries more than each other policy of `sessions`."""
    others = [name for name in POLICIES if name in sessions and name != PREDICT]
    ours = sessions.get(PREDICT)
    shape = "1P1D"
    return [replace(claims.claim(shape, ours, sessions[name], BEATS, WHAT[name]), target=PREDICT) for name in others]


def plot(sessions: Sequence[Session], path: Path) -> None:
    """The share of good requests over the offered rate, a line for each policy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for session, colour in zip(sessions, COLOURS, strict=False):
        points = sorted(session.points(), key=lambda point: point.rate_rps)
        rates, shares = [point.rate_rps for point in points], [point.good_fraction for point in points]
        axes.plot(rates, shares, "o-", label=WHAT[session.name], color=colour, linewidth=1.8)
    axes.axhline(sessions[0].terms.attainment, color="#999999", linewidth=1)
    axes.set(xlabel="requests/s", ylabel="share of good requests", ylim=(0, 1.02))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    parser = argparse.ArgumentParser(prog="python -m pdmux_ray.bench.steering", description=(__doc__ or "").split("\n\n")[0])
    every = f"default: all; of servers {','.join(POLICIES)}; simulated other thresholds, and 'no prefill instances'"
    parser.add_argument("--targets", metavar="T,T,…", help=every)
    text = "that `pdmux profile configs/1p1d.yaml` has made of this machine; without it one is measured first"
    parser.add_argument("--profile", type=Path, metavar="FILE", help=text)
    shares = ",".join(f"{share:g}" for share in SHARES)
    parser.add_argument("--shares", default=shares, metavar="S,S,…", help=f"ascending; default {shares}")
    text = f"of arrivals of each run, at least, or until there are --requests; default {SECONDS:g}"
    parser.add_argument("--seconds", type=float, default=SECONDS, help=text)
    parser.add_argument("--requests", type=int, default=REQUESTS, help=f"of each run, at least; default {REQUESTS}")
    parser.add_argument("--rounds", type=int, default=1, help="of each server at each rate; default 1")
    parser.add_argument("--model", default="demo", help="Hugging Face directory that all serve; default: the demo model")
    parser.add_argument("--out", type=Path, default=Path("steering"), metavar="DIR", help="default: steering")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="also draw good requests over the rate into this file")
    parser.add_argument("--simulated", action="store_true", help="a fleet of four GPUs on a virtual clock instead of servers")
    rates = ",".join(f"{rate:g}" for rate in RATES)
    parser.add_argument("--rates", default=rates, metavar="R,R,…", help=f"of the simulated fleet, requests/s; default {rates}")
    parser.add_argument("--force", action="store_true", help="replace the results that DIR has")
    parser.add_argument("--slo", default=SLO, metavar="SLO", help=f"default {SLO}: times the idle server's")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def make_study(args: argparse.Namespace, console: Console, routes: dict[str, Routes]) -> Study:
    """Raises ConfigError."""
    names = settings.chosen(args.targets or ",".join(POLICIES), None, tuple(POLICIES))
    if min(args.rounds, args.requests) < 1 or not args.seconds > 0:
        raise ConfigError("--rounds, --requests and --seconds must be over 0.")
    extent = Extent(args.rounds, args.seconds, args.requests, shares=read_shares(args.shares))
    work = workload()
    shape = Shape(work, Offer(work, duration_s=args.seconds, seed=args.seed), args.out)
    return Study(
        names,
        partial(command, args.profile),
        resolve(args.model),
        extent,
        [shape],
        args.slo,
        args.seed,
        console,
        deadline_s=time.monotonic() + extent.slowest_s(names, 1),
        serve=partial(served, routes),
        yardstick=YARDSTICK,
    )


def conclude(directory: Path, study: Study, routes: Mapping[str, Routes], picture: Path | None) -> bool:
    """Writes the report, prints the tables, which `tables.md` has, too. Whether everything that must hold was shown to hold."""
    (shape,) = study.shapes
    sessions = list(measured_sessions(shape, study.names))
    if not sessions or study.terms is None:
        return False
    write_report(directory, sessions)
    if picture is not None:
        plot(sessions, picture)
    of_names = {name: routes.get(study.command(name, study.terms.slo), Routes()) for name in study.names}
    found = found_claims({session.name: session for session in sessions})
    predictions, _ = bound.table({session.name: bound.read(session.directory) for session in sessions})
    lines = [
        *(line for rate in shape.rates for line in (*latencies(sessions, rate, WHAT), "")),
        *("Ways", "", *routes_table(of_names), ""),
        *("What must hold", "", *claims.table(found), ""),
        *("Predictions of steps", "", *predictions),
    ]
    (directory / "tables.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"\n{shape.workload.name}; SLO: {figures.slo(study.terms.slo)}\n\n" + "\n".join(lines))
    return claims.all_hold(found)


def simulated(args: argparse.Namespace, console: Console) -> bool:
    """Whether everything that must hold does. Raises ConfigError."""
    from pdmux_ray.bench import steering_fleet

    try:
        rates = sorted({float(rate) for rate in args.rates.split(",")})
    except ValueError:
        rates = []
    if not rates or not 0 < rates[0] <= rates[-1] < math.inf:
        raise ConfigError(f"--rates {args.rates!r}: they are numbers over 0, such as 40,50.")
    if not args.seconds > 0:
        raise ConfigError("--seconds must be over 0.")
    ways = steering_fleet.chosen(args.targets)
    work = steering_fleet.workload(EVERY)
    found = steering_fleet.outcomes(work, rates, args.seconds, args.seed, console, ways)
    return steering_fleet.conclude(args.out, found, BEATS)


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 when something does not hold or was not measured, 2 for a wrong argument, 130 after Ctrl-C."""
    args, console, routes = parser().parse_args(argv), Console(stderr=True), dict[str, Routes]()
    try:
        if args.simulated:
            return 0 if simulated(args, console) else 1
        study = make_study(args, console, routes)
        reserve_all([args.out, *(args.out / name for name in study.names)], args.force)
        study.describe()
        profile = settings.profile_of(CONFIG, args.profile, study.model, args.out, console)
        study = replace(study, command=partial(command, profile))
    except PdmuxError as error:
        print(f"steering: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    with measured() as outcome:
        study.carry_out(outcome)
    holds = conclude(args.out, study, routes, args.plot)
    whole = len(outcome.sessions) == len(study.names) and all(session.points() for session in outcome.sessions)
    return 130 if outcome.interrupted else 0 if whole and holds and outcome.stopped is None else 1


if __name__ == "__main__":
    settings.end_in_order()
    sys.exit(main())
