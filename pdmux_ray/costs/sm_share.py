"""How long steps take on a part of a GPU, and beside another lane: from times on all of it to the parameters of a cost model.

On u of U streaming multiprocessors (SM), what computes takes (U / u) ** compute_exponent times as long, and what reads memory
as many times as decodes were measured to: a few SMs draw most of the bandwidth. Of a pass over tokens the longer of both
counts. What GPUs tell each other (tensor parallelism) and what the host does take as long on any number of them.

None of this follows from the times on all of a GPU. So it is assumed: `Assumptions` has each number with the publication that
it is from, and `--assume KEY=VALUE` sets another, because a conclusion that turns with one of them is none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from itertools import pairwise

from pdmux_ray.errors import ConfigError
from pdmux_ray.latency.model import SIZES_S, Contention, LaneModel, Parameters, bandwidth_at

_LEVELS = 4  # units between two levels of a lane's terms


class Nature(Enum):
    """What a number is: what it can be, and how it is halved and doubled (`scaled`)."""

    OVER_ONE = "a bound over its prediction"
    EFFICIENCY = "a share of what could be had"
    SHARE = "a share that may be 0"
    QUOTIENT = "a quotient"


class Concern(Enum):
    """Which fleets an assumption makes a difference to."""

    ALL = "all"
    GROUPS = "instances of several GPUs"
    TRANSFERS = "instances that send each other KV"


_NATURE, _CONCERN = "nature", "concern"  # keys of a field's metadata


def _assumed(default: float, nature: Nature | None = None, of: Concern = Concern.ALL) -> float:
    """A field of `Assumptions`."""
    found: float = field(default=default, metadata={_NATURE: nature, _CONCERN: of})
    return found


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What is taken for granted of every GPU. Values >= 0; docs/simulate.md says what each one does.

    Where the defaults are from:
    - `compute_exponent`: Bullet (arXiv:2504.19516), C_p = C_peak * N_p / N. The tables that the authors of MuxWise
      (arXiv:2504.14489) published say 1 on a few SMs and 0.57 between 32 and 104 of an A100's: 1 is the careful one.
    - `decode_beside`: MuxWise: decodes at most 30 % slower beside a prefill, at fixed SMs of an H100 (20 % on an A100).
    - `switch_s`: MuxWise: microseconds; here both lanes wait for each other, too.
    - `guard`: MuxWise's predictor errs by 8.2 % (prefill) and 8.8 % (decode) at most.
    - `host_s`: this project's own control plane, measured on a CPU (docs/performance.md): plan, apply, commit and publish take
      55 to 120 us a step at a batch of 64, 159 to 408 at 256. What a launch takes of the host on a GPU is not measured.
    - `allreduce_s`, `allreduce_efficiency`: of vLLM's all-reduce in the measured database of aiconfigurator 0.12, on 2 to 8
      GPUs: 4.6 to 5.7 us of a few bytes (A100: 5.3 to 6.9); 0.52 to 0.79 of the link with 32 MiB, 0.64 to 0.93 with 128 MiB
      (A100: 0.5 to 0.54, 0.6 to 0.67).
    - Without a source: `prefill_beside`, `overlap`.
    """

    compute_exponent: float = 1.0  # of the share of SMs: how computing slows
    read_loss: float = 1.0  # times what fewer SMs were measured to cost a decode, see `Gpu.decode_slower`
    decode_beside: float = _assumed(
        0.3, Nature.SHARE
    )  # of the bandwidth that its SMs could draw: what a prefill takes from decodes
    prefill_beside: float = 0.05  # of its time: what a prefill loses beside decodes
    overlap: float = 0.1  # of its time: what a lane loses when some SMs are the other's, too, besides half of those
    switch_s: float = 100e-6  # a change of the split
    host_s: float = 100e-6  # of a step or a block of layers, in which the GPU waits for the host
    guard: float = _assumed(1.1, Nature.OVER_ONE)  # a bound over its prediction
    allreduce_s: float = _assumed(6e-6, of=Concern.GROUPS)  # sum over the GPUs of a group, besides its bytes
    allreduce_efficiency: float = _assumed(0.65, Nature.EFFICIENCY, Concern.GROUPS)  # of the link between them
    link: float = _assumed(1.0, Nature.QUOTIENT, Concern.TRANSFERS)  # of what the network between instances is said to carry

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        for one in fields(self):
            value, nature = getattr(self, one.name), one.metadata.get(_NATURE)
            if not 0 <= value <= 100:
                raise ConfigError(f"--assume {one.name}={value:g}: give a number from 0 to 100.")
            if nature not in (None, Nature.SHARE) and not value:
                raise ConfigError(f"--assume {one.name}=0: give more than 0.")
            if nature in (Nature.EFFICIENCY, Nature.SHARE) and value > 1:
                raise ConfigError(f"--assume {one.name}={value:g}: it is a share; give at most 1.")
            if nature is Nature.OVER_ONE and value < 1:
                raise ConfigError(f"--assume {one.name}={value:g}: a bound is no less than its prediction; give at least 1.")


def assumptions(changes: Sequence[str]) -> Assumptions:
    """The defaults but for KEY=VALUE, of each. Raises ConfigError."""
    known = [one.name for one in fields(Assumptions)]
    found = {}
    for change in changes:
        key, _, value = change.partition("=")
        try:
            found[key.strip()] = float(value)
        except ValueError:
            raise ConfigError(f"--assume {change!r} is not understood: give KEY=NUMBER, such as decode_beside=0.5.") from None
        if key.strip() not in known:
            raise ConfigError(f"--assume {change!r}: there is no such assumption. Give one of {', '.join(known)}.")
    return replace(Assumptions(), **found)


def scaled(name: str, value: float, factor: float) -> float:
    """An assumption halved, doubled and so on: of a bound the part above 1; a share is 1 at most."""
    match _METADATA[name].get(_NATURE):
        case Nature.OVER_ONE:
            return 1 + (value - 1) * factor
        case Nature.EFFICIENCY | Nature.SHARE:
            return min(value * factor, 1.0)
        case _:
            return value * factor


def concern(name: str) -> Concern:
    """Which fleets an assumption makes a difference to."""
    found = _METADATA[name].get(_CONCERN, Concern.ALL)
    assert isinstance(found, Concern)
    return found


_METADATA = {one.name: one.metadata for one in fields(Assumptions)}


@dataclass(frozen=True, slots=True)
class Ramp:
    """Seconds by a count of rows or tokens: at each knot, straight lines between, and what one more takes after the last."""

    knots: tuple[int, ...]
    values_s: tuple[float, ...]
    after_s: float

    @property
    def slopes(self) -> list[float]:
        at = zip(self.knots, self.values_s, strict=True)
        between = [(after - before) / (high - low) for (low, before), (high, after) in pairwise(at)]
        return [*between, self.after_s]

    @classmethod
    def line(cls, knots: tuple[int, ...], at_0_s: float, each_s: float) -> Ramp:
        return cls(knots, tuple(at_0_s + each_s * knot for knot in knots), each_s)


@dataclass(frozen=True, slots=True)
class WholeTimes:
    """Seconds of all layers, on all units of each GPU of a group, alone."""

    step_s: float  # of a step, whatever it does
    block_s: float  # of the launch of a block of layers
    rows: Ramp  # a decode step of so many requests (BATCH_KNOTS), without attention to their context; at 0: reading weights
    context_s: float  # of a token of a decode's context
    pass_row_s: float  # of a decode in a pass with a prefill, besides that it is a token
    tokens: (
        Ramp  # a pass over so many tokens (TOKEN_KNOTS), without attention; at 0: reading weights; after the last: computing
    )
    own_s: float  # attention of a token to another of its prefill
    reused_s: float  # and to one before that
    exchange_rows: Ramp  # between the GPUs, as `rows`
    exchange_tokens: Ramp  # and as `tokens`


def parameters_of(
    times: WholeTimes, layers: int, units: int, slower: Sequence[tuple[int, float]], bytes_per_s: float, assume: Assumptions
) -> Parameters:
    """What a profile of it would hold. `slower`: (units, how many times as long reading takes there), ascending."""
    reading = tuple((at, 1 + assume.read_loss * (factor - 1)) for at, factor in slower)
    shares = _Shares(times, layers, units, reading, assume)
    levels = tuple(range(_LEVELS, units + 1, _LEVELS))
    whole = shares.tokens(units)
    pass_s = times.step_s + assume.host_s + whole.values_s[0] + times.exchange_tokens.values_s[0]
    return Parameters(
        layers=layers,
        units=units,
        switch_s=assume.switch_s,
        bandwidth=tuple((at, bytes_per_s / factor) for at, factor in reading),
        decode=LaneModel(
            levels,
            times.step_s + assume.host_s + times.exchange_rows.values_s[0],
            tuple(map(shares.decode, levels)),
            Contention(demand=assume.decode_beside, shared=assume.overlap, share=1.0),
        ),
        prefill=LaneModel(
            levels,
            times.block_s + assume.host_s,
            tuple(map(shares.prefill, levels)),
            Contention(neighbour=assume.prefill_beside, shared=assume.overlap, share=1.0),
        ),
        mixed=(pass_s, times.own_s, times.reused_s, 0.0, times.context_s, times.pass_row_s, *shares.slopes(whole)),
        guards=dict.fromkeys(("decode", "prefill", "mixed"), (assume.guard,) * (len(SIZES_S) + 1)),
    )


@dataclass(frozen=True, slots=True)
class _Shares:
    """Terms on some of the units."""

    times: WholeTimes
    layers: int
    units: int
    reading: tuple[tuple[int, float], ...]
    assume: Assumptions

    def decode(self, units: int) -> tuple[float, ...]:
        """Aligned with `features.DECODE`."""
        slower, times = self._reading(units), self.times
        rows = [row * slower + sent for row, sent in zip(times.rows.slopes, times.exchange_rows.slopes, strict=True)]
        return (times.rows.values_s[0] * slower, times.context_s * slower, *rows)

    def prefill(self, units: int) -> tuple[float, ...]:
        """Aligned with `features.PREFILL`: of a layer. What reads weights reads those of the output head, too."""
        times, share, tokens = self.times, self._computing(units) / self.layers, self.tokens(units)
        layer = (times.step_s + tokens.values_s[0] + times.exchange_tokens.values_s[0]) / self.layers
        slopes = (slope / self.layers for slope in self.slopes(tokens))
        return (layer, times.own_s * share, times.reused_s * share, 0.0, 0.0, *slopes, 0.0)

    def tokens(self, units: int) -> Ramp:
        """As slow as reading gets, or as the part of it that is computing."""
        whole, slower, computing = self.times.tokens, self._reading(units), self._computing(units)
        values = (
            max(seconds * slower, min(whole.after_s * tokens, seconds) * computing)
            for tokens, seconds in zip(whole.knots, whole.values_s, strict=True)
        )
        return Ramp(whole.knots, tuple(values), whole.after_s * computing)

    def slopes(self, tokens: Ramp) -> list[float]:
        """With what is exchanged."""
        return [slope + sent for slope, sent in zip(tokens.slopes, self.times.exchange_tokens.slopes, strict=True)]

    def _computing(self, units: int) -> float:
        return math.pow(self.units / units, self.assume.compute_exponent)

    def _reading(self, units: int) -> float:
        """Interpolated as speeds, which units add to."""
        return 1 / bandwidth_at([(at, 1 / factor) for at, factor in self.reading], units)
