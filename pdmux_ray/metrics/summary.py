"""The figures of runs, as `summary.json` holds them: the load generator and the simulator write the same file.

Pure, but for `write`, `write_whole` and `read`.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from pdmux_ray.errors import ConfigError
from pdmux_ray.metrics.goodput import DEFINITION, Goodput, RatePoint, Slo, Verdict, goodput
from pdmux_ray.metrics.lifeline import Lifeline, quantile

FILE_NAME = "summary.json"


@dataclass(frozen=True, slots=True)
class Stats:
    """Of one measure over one run, exact, in the measure's unit. All None without a sample.

    A request that never had the measure is no sample: figures of a run with `errors` are those of the requests that got so far.
    """

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Stats:
        if not values:
            return cls(None, None, None, None, None)
        ordered = sorted(values)
        middle, high, tail = (quantile(ordered, q) for q in (0.5, 0.9, 0.99))
        return cls(statistics.fmean(ordered), middle, high, tail, ordered[-1])


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One rate offered to one target."""

    target: str
    rate: float  # requests a second that were offered; of a closed loop those that were sent
    requests: int
    errors: int  # requests that did not complete: errors, truncated and unfinished ones
    ttft_s: Stats
    itl_s: Stats  # all gaps of all requests together
    tpot_s: Stats
    e2e_s: Stats
    output_tokens_per_s: float  # tokens that arrived, over the time from the first planned arrival to the last token
    good_fraction: float
    verdicts: Mapping[str, int]  # every `Verdict` value -> requests
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    send_lag_s: Stats  # sent minus planned: the client's own lateness
    invalid: str | None = None  # why the run must not be used; None: it may


@dataclass(frozen=True, slots=True)
class Summary:
    """All runs of one target."""

    runs: Sequence[RunSummary]
    goodput_rps: float  # per device
    goodput_ci: tuple[float, float]
    goodput_bound: str  # a `Bound` value
    slo: Slo
    attainment: float
    devices: int = 1
    definition: str = DEFINITION
    conditions: Mapping[str, str] = field(default_factory=dict)  # what was asked; runs with other ones do not compare
    notes: Sequence[str] = ()  # what a reader must know: scaling rules, how tokens were counted, what went wrong


def summarize_run(target: str, rate: float, lifelines: Sequence[Lifeline], slo: Slo, invalid: str | None = None) -> RunSummary:
    """Of requests in any order, on one clock. Raises ConfigError without any."""
    if not lifelines:
        raise ConfigError(
            f"No request was sent to {target} at {rate:g} requests/s, so there is nothing to sum up. Run it longer."
        )
    verdicts = Counter(slo.verdict(lifeline).value for lifeline in lifelines)
    begin_s = min(lifeline.due_s for lifeline in lifelines)
    end_s = max((lifeline.token_s[-1] for lifeline in lifelines if lifeline.token_s), default=begin_s)
    output_tokens = sum(len(lifeline.token_s) for lifeline in lifelines)
    good = verdicts[Verdict.GOOD.value]
    return RunSummary(
        target=target,
        rate=rate,
        requests=len(lifelines),
        errors=sum(verdicts[miss.value] for miss in (Verdict.ERROR, Verdict.TRUNCATED, Verdict.UNFINISHED)),
        ttft_s=Stats.of([s for lifeline in lifelines if (s := lifeline.ttft_s) is not None]),
        itl_s=Stats.of([gap for lifeline in lifelines for gap in lifeline.gaps_s]),
        tpot_s=Stats.of([s for lifeline in lifelines if (s := lifeline.tpot_s) is not None]),
        e2e_s=Stats.of([s for lifeline in lifelines if (s := lifeline.e2e_s) is not None]),
        output_tokens_per_s=output_tokens / (end_s - begin_s) if end_s > begin_s else 0.0,
        good_fraction=good / len(lifelines),
        verdicts={verdict.value: verdicts[verdict.value] for verdict in Verdict},
        duration_s=end_s - begin_s,
        prompt_tokens=sum(lifeline.prompt_tokens for lifeline in lifelines),
        output_tokens=output_tokens,
        send_lag_s=Stats.of([lag for lifeline in lifelines if (lag := lifeline.sent_s - lifeline.due_s) == lag]),  # not NaN
        invalid=invalid,
    )


def rate_point(rate: float, lifelines: Sequence[Lifeline], slo: Slo) -> RatePoint:
    """For `goodput`."""
    ordered = sorted(lifelines, key=lambda lifeline: lifeline.due_s)
    return RatePoint(rate, [slo.verdict(lifeline) is Verdict.GOOD for lifeline in ordered])


def summarize(
    runs: Sequence[RunSummary], points: Sequence[RatePoint], slo: Slo, attainment: float, devices: int = 1
) -> Summary:
    """`points` are those of the valid runs, one for each rate. Without any the goodput is 0, and says so."""
    found = goodput(points, attainment) if points else Goodput.unknown()
    low, high = found.ci
    return Summary(runs, found.rps / devices, (low / devices, high / devices), found.bound.value, slo, attainment, devices)


def write(summary: Summary, directory: Path) -> Path:
    """Makes `directory/summary.json`."""
    return write_whole(directory / FILE_NAME, json.dumps(asdict(summary), indent=1, allow_nan=False) + "\n")


def write_whole(path: Path, text: str) -> Path:
    """Makes the file whole or not at all, and the directories it needs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        return partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def read(directory: Path) -> Summary:
    """Raises ConfigError when there is none, or one that was not written by `write`."""
    path = directory / FILE_NAME
    try:
        document: dict[str, Any] = json.loads(path.read_text(), parse_constant=refuse_constant)
        runs = [_run(run) for run in document.pop("runs")]
        slo = Slo(**document.pop("slo"))
        return Summary(
            runs=runs, slo=slo, **document | {"goodput_ci": tuple(document["goodput_ci"]), "notes": tuple(document["notes"])}
        )
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist. Give a directory that a finished run has written.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is not a summary of this version: {error!r}. Run the benchmark again.") from error


def refuse_constant(name: str) -> NoReturn:
    """For `json.loads`: NaN and infinities, which `write` never writes. Raises ValueError."""
    raise ValueError(f"{name} is no figure")


def _run(document: dict[str, Any]) -> RunSummary:
    stats = {name: Stats(**document[name]) for name in ("ttft_s", "itl_s", "tpot_s", "e2e_s", "send_lag_s")}
    return RunSummary(**document | stats | {"rate": float(document["rate"])})
