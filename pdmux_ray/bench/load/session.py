"""The runs of one target: judges them, and keeps `summary.json` and `requests.jsonl` up to date after each.

`requests.jsonl` has one lifeline a line: {"run": index in summary.json, "due_s": …, "token_s": […], …}, times in seconds from
the run's first arrival, to the microsecond; null where something never happened.

`units.jsonl`, of servers that tell their timeline: {"run": …, "time_s": …, "prefill_units": …, "decode_units": …} from then on.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from pdmux_ray.bench.load.offer import Terms
from pdmux_ray.errors import ConfigError
from pdmux_ray.metrics import summary as summaries
from pdmux_ray.metrics.goodput import RatePoint, Slo
from pdmux_ray.metrics.lifeline import Ending, Lifeline
from pdmux_ray.metrics.summary import RunSummary, Summary
from pdmux_ray.report.series import UnitsSample

REQUESTS_FILE = "requests.jsonl"
UNITS_FILE = "units.jsonl"

_TIMES = ("due_s", "sent_s", "ended_s")
_PLAIN = ("finish_reason", "error", "prompt_tokens", "asked_tokens")


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run of one target, with every lifeline that counts, in the order of their arrival, from the run's first arrival."""

    rate: float  # offered; of a closed loop the one that came about
    lifelines: Sequence[Lifeline]
    invalid: str | None = None


class _Judged(NamedTuple):
    """A record under some terms."""

    record: RunRecord  # kept, so that no other one gets its identity
    run: RunSummary
    point: RatePoint


class Session:
    """The runs of one target. Owns its directory."""

    def __init__(self, name: str, directory: Path, terms: Terms, conditions: Mapping[str, str]) -> None:
        self.name = name
        self.directory = directory
        self.terms = terms
        self.conditions = dict(conditions)  # what was asked of the target, in words
        self.notes: list[str] = []
        self.records: list[RunRecord] = []
        self.units: list[UnitsSample] = []  # of the runs whose server tells its timeline
        self.finished = False  # its files stay as they are
        self._judged: dict[tuple[int, str, Slo], _Judged] = {}  # by the record's identity and what it was judged by

    @classmethod
    def read(cls, name: str, directory: Path) -> Session:
        """A finished one, under the terms of its files. Raises ConfigError when the files are not whole."""
        summary = summaries.read(directory)
        terms = Terms(summary.slo, summary.attainment, summary.devices)
        session = cls(name, directory, terms, summary.conditions)
        session.notes = list(summary.notes)
        session.finished = True
        lifelines = read_requests(directory, len(summary.runs))
        for run, of_run in zip(summary.runs, lifelines, strict=True):
            if len(of_run) != run.requests:
                raise ConfigError(f"{directory}: summary.json and {REQUESTS_FILE} are not of the same runs. Run it again.")
            session.records.append(RunRecord(run.rate, of_run, run.invalid))
        session.units = read_units(directory)
        return session

    def add(self, record: RunRecord) -> RunSummary:
        """Takes a run in and writes the files. Raises OSError when it cannot."""
        self.records.append(record)
        append_requests(self.directory, len(self.records) - 1, record.lifelines)
        summary = self.write()
        return summary.runs[-1]

    def add_units(self, samples: Sequence[UnitsSample]) -> None:
        """Of the last run. Raises OSError when they cannot be written."""
        self.units += samples
        with (self.directory / UNITS_FILE).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(sample), separators=(",", ":")) + "\n" for sample in samples)

    def note(self, text: str) -> None:
        """Something that the report must say, once."""
        if text not in self.notes:
            self.notes.append(text)

    def write(self) -> Summary:
        """summary.json, whole or not at all."""
        summary = self.summary()
        summaries.write(summary, self.directory)
        return summary

    def judged_runs(self) -> list[RunSummary]:
        """Under the session's terms."""
        return [self._judge(record).run for record in self.records]

    def points(self) -> list[RatePoint]:
        """Of the valid runs. Rounds at the same rate make one point, each in its own order. None in a closed loop: what it
        offers follows the server, so that there is no offered rate to speak of."""
        if self.conditions.get("load", "").startswith("closed"):
            return []
        good: dict[float, list[bool]] = {}
        for record in self.records:
            if record.invalid is None:
                good.setdefault(record.rate, []).extend(self._judge(record).point.good)
        return [RatePoint(rate, verdicts) for rate, verdicts in good.items()]

    def _judge(self, record: RunRecord) -> _Judged:
        """Once: each file and table asks, and for a long run it takes seconds."""
        slo = self.terms.slo
        found = self._judged.get((id(record), self.name, slo))
        if found is None:
            run = summaries.summarize_run(self.name, record.rate, record.lifelines, slo, record.invalid)
            found = _Judged(record, run, summaries.rate_point(record.rate, record.lifelines, slo))
            self._judged[id(record), self.name, slo] = found
        return found

    def summary(self) -> Summary:
        terms = self.terms
        judged = summaries.summarize(self.judged_runs(), self.points(), terms.slo, terms.attainment, terms.devices)
        return replace(judged, conditions=self.conditions, notes=tuple(self.notes))


def append_requests(directory: Path, run: int, lifelines: Sequence[Lifeline]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / REQUESTS_FILE).open("a", encoding="utf-8") as file:
        for lifeline in lifelines:
            file.write(json.dumps({"run": run, **_as_json(lifeline)}, allow_nan=False, separators=(",", ":")) + "\n")


def read_requests(directory: Path, runs: int) -> list[list[Lifeline]]:
    """The lifelines of each of `runs` runs, in the order of the file. Raises ConfigError."""
    path = directory / REQUESTS_FILE
    found: list[list[Lifeline]] = [[] for _ in range(runs)]
    try:
        for number, document in _documents(path):
            try:
                found[document.pop("run")].append(_lifeline(document))
            except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                raise ConfigError(f"{path}, line {number} is not a request of summary.json's runs: {error!r}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}. Give a directory that a finished run has written.") from None
    return found


def read_units(directory: Path) -> list[UnitsSample]:
    """None where no server told its timeline. Raises ConfigError."""
    path = directory / UNITS_FILE
    found = []
    for number, document in _documents(path) if path.exists() else ():
        try:
            found.append(UnitsSample(**document))
        except TypeError as error:
            raise ConfigError(f"{path}, line {number} is no sample of units: {error}") from None
    return found


def _documents(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                yield number, json.loads(line, parse_constant=summaries.refuse_constant)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{path}, line {number} is not JSON: {error}") from None


def from_first_arrival(lifelines: Sequence[Lifeline]) -> list[Lifeline]:
    """The same in the order of their arrival, on a clock that starts with the first of them."""
    ordered = sorted(lifelines, key=lambda lifeline: lifeline.due_s)
    begin_s = ordered[0].due_s if ordered else 0.0
    return [
        replace(
            lifeline,
            **{name: getattr(lifeline, name) - begin_s for name in _TIMES},
            token_s=array("d", [time_s - begin_s for time_s in lifeline.token_s]),
        )
        for lifeline in ordered
    ]


def _as_json(lifeline: Lifeline) -> dict[str, Any]:
    times = {name: _rounded(getattr(lifeline, name)) for name in _TIMES}
    plain = {name: getattr(lifeline, name) for name in _PLAIN}
    return {**times, "ending": lifeline.ending.value, **plain, "token_s": [round(t, 6) for t in lifeline.token_s]}


def _rounded(time_s: float) -> float | None:
    return None if math.isnan(time_s) else round(time_s, 6)


def _lifeline(document: dict[str, Any]) -> Lifeline:
    fields: dict[str, Any] = {name: math.nan if document[name] is None else float(document[name]) for name in _TIMES}
    fields |= {name: document[name] for name in _PLAIN}
    if math.isnan(fields["due_s"]) or type(fields["prompt_tokens"]) is not int:
        raise ValueError("due_s or prompt_tokens is no number")
    return Lifeline(**fields, ending=Ending(document["ending"]), token_s=array("d", document["token_s"]))
