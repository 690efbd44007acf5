"""The file that `pdmux profile` writes and an instance loads: the parameters, how good they are, and what was measured."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from pdmux_ray.errors import ConfigError, PdmuxError
from pdmux_ray.latency.features import DECODE, PREFILL
from pdmux_ray.latency.identity import Identity, check
from pdmux_ray.latency.model import FittedCosts, Parameters
from pdmux_ray.latency.records import PERCENTILES, Quality, Record, percentile

FORMAT = 2
MOST_SLOWER = 1.05  # measured on more units, relative to fewer: noise
LEAST_COVERAGE = 0.97  # of held-out times by the 99 % bound, in each kind of step


class ProfileQualityError(PdmuxError):
    """The measurements do not make a model to rely on; the message has the table. Nothing was written."""


class MeasuredPoint(BaseModel):
    """A record, with percentiles (`records.PERCENTILES`) in place of its times."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    role: str
    units: int
    beside: int
    batch: int
    context_tokens: int
    pieces: tuple[tuple[int, int], ...]
    layers: int
    last: bool
    samples: int
    percentiles_s: tuple[float, ...]
    predicted_s: float
    bound_s: float

    @classmethod
    def of(cls, record: Record, predicted_s: float, bound_s: float) -> MeasuredPoint:
        kept = {name: getattr(record, name) for name in cls.model_fields if hasattr(record, name)}
        return cls(
            **kept,
            samples=len(record.times_s),
            percentiles_s=tuple(percentile(record.times_s, p) for p in PERCENTILES),
            predicted_s=predicted_s,
            bound_s=bound_s,
        )


class Probe(BaseModel):
    """What the hardware gives on each number of units."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    units: tuple[int, ...]
    bytes_per_s: tuple[float, ...]  # stream triad
    flop_per_s: tuple[float, ...]  # matrix product in the profile's dtype


class Profile(BaseModel):
    """Of one (model, device, TP) with its software."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int
    identity: Identity
    took_s: float
    disturbed: float  # share of the work during whose measuring other programs used the cores, too
    probe: Probe
    parameters: Parameters
    qualities: tuple[Quality, ...]
    points: tuple[MeasuredPoint, ...]

    def costs(self) -> FittedCosts:
        """As it was measured: what corrects itself is a `CorrectedCosts` over this."""
        return FittedCosts(self.parameters)

    def write(self, path: Path) -> None:
        """All or nothing. Raises ProfileQualityError instead when the model is not good enough."""
        require_quality(self)
        beside = path.with_name(path.name + ".new")
        beside.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        os.replace(beside, path)


def load(path: Path, wanted: Identity) -> Profile:
    """Raises ConfigError when the file is no profile, ProfileMismatchError when it is one of something else."""
    profile = read(path)
    check(profile.identity, wanted, str(path))
    return profile


def read(path: Path) -> Profile:
    """Whatever it is of. Raises ConfigError when the file is no sound profile."""
    try:
        profile = Profile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"cannot read the profile {path}: {error.strerror}. `pdmux profile CONFIG --out FILE` writes one"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path} is no profile of this version: {where}: {first['msg']}. Measure again") from None
    if profile.format != FORMAT:
        raise ConfigError(f"{path} has format {profile.format}, this version reads {FORMAT}: measure again")
    if problem := rising(profile.parameters):
        raise ConfigError(f"{path} is not sound: {problem}. Measure again")
    return profile


def require_quality(profile: Profile) -> None:
    """Raises ProfileQualityError when a kind's coverage is too low, or when more units are slower somewhere."""
    qualities = profile.qualities
    wrong = [problem for problem in (rising(profile.parameters), contradiction(profile.points)) if problem]
    for kind in ("decode", "prefill", "mixed"):
        share = coverage(qualities, kind)
        if share < LEAST_COVERAGE:
            wrong.append(
                f"only {share:.1%} of the held-out {kind} times are under their 99 % bound; {LEAST_COVERAGE:.0%} must be"
            )
    if wrong:
        raise ProfileQualityError(
            "the profile was not written: "
            + "; ".join(wrong)
            + ".\n"
            + table(qualities)
            + "\nAnother program on these units is the usual cause: end it and run the same command again."
        )


def coverage(qualities: Sequence[Quality], kind: str) -> float:
    """Share of the held-out times of a kind of step that are under their bound."""
    parts = [quality for quality in qualities if quality.part.split()[0] == kind]
    samples = sum(quality.samples for quality in parts)
    return sum(quality.coverage * quality.samples for quality in parts) / samples if samples else 0.0


def table(qualities: Sequence[Quality]) -> str:
    lines = [f"{'held out':24} {'points':>7} {'times':>7} {'median error':>13} {'p90 error':>10} {'coverage':>9}"]
    lines += [
        f"{q.part:24} {q.points:7} {q.samples:7} {q.median_error:13.1%} {q.p90_error:10.1%} {q.coverage:9.1%}"
        for q in qualities
    ]
    return "\n".join(lines)


def rising(parameters: Parameters) -> str | None:
    """The first term that is negative or grows with the units, if any."""
    for kind, lane, names in (("decode", parameters.decode, DECODE), ("prefill", parameters.prefill, PREFILL)):
        for (_, fewer), (units, more) in pairwise(zip(lane.levels, lane.terms, strict=True)):
            for name, before, after in zip(names, fewer, more, strict=True):
                if not 0 <= after <= before * (1 + 1e-9):
                    return f"{kind} is slower on {units} units than on fewer, by the term {name!r}"
    return None


def contradiction(points: Sequence[MeasuredPoint]) -> str | None:
    """Where more units were measured to be slower at the same work alone, by the median over all work, if anywhere."""
    seen: dict[tuple[str, int], dict[object, float]] = defaultdict(dict)
    for point in points:
        if point.role == "fit" and not (point.beside or point.last or point.kind == "mixed"):
            work = (point.batch, point.context_tokens, point.pieces)
            seen[point.kind, point.units][work] = point.percentiles_s[1] / max(point.layers, 1)
    for (kind, fewer), (other, more) in pairwise(sorted(seen)):
        ratios = [took_s / seen[kind, fewer][work] for work, took_s in seen[kind, more].items() if work in seen[kind, fewer]]
        if kind == other and ratios and percentile(ratios, 50) > MOST_SLOWER:
            return f"{kind} was {percentile(ratios, 50):.2f} times as slow on {more} units as on {fewer}"
    return None
