"""SLOs as they are written on the command line.

ttft=0.5,itl=50ms            seconds, or with a unit (s, ms, us)
ttft=200ms+1.5ms/token       a long prompt may take longer
itl.p99=50ms                 which statistic of a request's own gaps (default p99)
ttft=5x,itl=3x               times what one request alone takes on an idle server, which is measured first
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from pdmux_ray.errors import ConfigError
from pdmux_ray.metrics.goodput import Slo

HELP = "such as ttft=0.5,itl=50ms or ttft=200ms+1.5ms/token,itl.p90=50ms or ttft=5x,itl=3x (times an idle server)"

_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"
_TIME = re.compile(rf"{_NUMBER}(s|ms|us|)")
_SLOPE = re.compile(rf"{_NUMBER}(s|ms|us|)/token")
_TIMES = re.compile(rf"{_NUMBER}x")


@dataclass(frozen=True, slots=True)
class SoloLatency:
    """What one request takes when it has the server to itself. TTFT is `ttft_s + ttft_s_per_token * prompt tokens`."""

    ttft_s: float
    ttft_s_per_token: float
    itl_s: float  # median

    def __str__(self) -> str:
        return (
            f"alone on an idle server: TTFT {self.ttft_s * 1e3:.1f} ms + {self.ttft_s_per_token * 1e3:.3f} ms per prompt "
            f"token, median ITL {self.itl_s * 1e3:.2f} ms"
        )


@dataclass(frozen=True, slots=True)
class SloText:
    """A parsed SLO. A factor stands for a limit that is not known before the solo latencies are measured."""

    slo: Slo  # without what the factors will add
    ttft_factor: float | None = None
    itl_factor: float | None = None

    @classmethod
    def parse(cls, text: str) -> SloText:
        """Raises ConfigError, with an example of what is right."""
        ttft: tuple[float, float] | None = None
        itl_s: float | None = None
        factors: dict[str, float] = {}
        statistic, seen = "p99", set()
        for part in text.replace(" ", "").split(","):
            key, _, value = part.partition("=")
            measure, _, stated = key.partition(".")
            if measure in seen or measure not in ("ttft", "itl") or (stated and measure == "ttft"):
                raise ConfigError(f"--slo {text!r}: {part!r} is not understood. Write it {HELP}.")
            seen.add(measure)
            statistic = stated or statistic
            if factor := _TIMES.fullmatch(value):
                factors[measure] = _positive(float(factor[1]), text)
            elif measure == "ttft":
                ttft = _ttft(value, text)
            else:
                itl_s = _seconds(value, text)
        ttft_s, per_token_s = ttft or (None, 0.0)
        slo = Slo(ttft_s=ttft_s, itl_s=itl_s, ttft_s_per_token=per_token_s, itl_statistic=statistic)
        return cls(slo, factors.get("ttft"), factors.get("itl"))

    @property
    def needs_solo(self) -> bool:
        return self.ttft_factor is not None or self.itl_factor is not None

    def resolve(self, solo: SoloLatency | None) -> Slo:
        """The SLO in seconds. `solo` may be None when `needs_solo` is false."""
        if not self.needs_solo:
            return self.slo
        if solo is None:
            raise ConfigError("an SLO in multiples of an idle server's latency needs a server to measure. State it in seconds.")
        slo, ttft, itl = self.slo, self.ttft_factor, self.itl_factor
        return Slo(
            ttft_s=slo.ttft_s if ttft is None else ttft * solo.ttft_s,
            itl_s=slo.itl_s if itl is None else itl * solo.itl_s,
            ttft_s_per_token=slo.ttft_s_per_token if ttft is None else ttft * solo.ttft_s_per_token,
            itl_statistic=slo.itl_statistic,
        )


def _ttft(value: str, text: str) -> tuple[float, float]:
    """(seconds, seconds per prompt token)."""
    fixed, plus, slope = value.partition("+")
    if not plus:
        return _seconds(fixed, text), 0.0
    match = _SLOPE.fullmatch(slope)
    if match is None:
        raise ConfigError(f"--slo {text!r}: {slope!r} is not a time per token. Write it {HELP}.")
    return _seconds(fixed, text), _positive(float(match[1]) * _UNITS[match[2]], text)


def _seconds(value: str, text: str) -> float:
    match = _TIME.fullmatch(value)
    if match is None:
        raise ConfigError(f"--slo {text!r}: {value!r} is not a time. Write it {HELP}.")
    return _positive(float(match[1]) * _UNITS[match[2]], text)


def _positive(value: float, text: str) -> float:
    if not 0 < value < math.inf:
        raise ConfigError(f"--slo {text!r}: every limit must be over 0.")
    return value
