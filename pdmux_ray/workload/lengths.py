"""Distributions of lengths in tokens, made from what publications state. Pure.

A source that gives quantiles becomes `Quantiles`; one that gives only least, mean and most becomes `PowerLaw`. Both are given
by their quantile function, so that one uniform draw makes one length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Lengths(Protocol):
    @property
    def mean(self) -> float:
        """Before rounding to whole tokens."""

    def at(self, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
        """The lengths whose share of shorter ones is `uniform` (any shape, in [0, 1)), in whole tokens."""


@dataclass(frozen=True)
class Fixed:
    tokens: int

    @property
    def mean(self) -> float:
        return float(self.tokens)

    def at(self, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
        return np.full(uniform.shape, self.tokens, dtype=np.int64)


@dataclass(frozen=True)
class PowerLaw:
    """Density proportional to x^(-a-1) between `least` and `most`: the truncated Pareto distribution whose exponent a gives
    `mean`. a = 0 is log-uniform. The assumption for lengths of which only these three numbers are known: they are positive,
    spread over orders of magnitude, and skewed to the right.
    """

    least: float
    mean: float
    most: float

    @cached_property
    def exponent(self) -> float:
        """By bisection; the mean falls as it grows. Its bounds reach means within a few tokens of `least` and `most`."""
        low, high = -50.0, 50.0
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if self._mean_for(middle) > self.mean else (low, middle)
        return (low + high) / 2

    def at(self, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
        ratio, a = math.log(self.most / self.least), self.exponent
        # ln(x / least) has density proportional to exp(-a t) on [0, ratio].
        log = uniform * ratio if abs(a) < 1e-9 else -np.log1p(uniform * math.expm1(-a * ratio)) / a
        return np.rint(self.least * np.exp(log)).astype(np.int64)

    def _mean_for(self, a: float) -> float:
        ratio = math.log(self.most / self.least)
        return self.least * _integral(1 - a, ratio) / _integral(-a, ratio)


def _integral(rate: float, length: float) -> float:
    """Of exp(rate * t) over [0, length]."""
    return length if abs(rate) < 1e-9 else math.expm1(rate * length) / rate


@dataclass(frozen=True)
class Quantiles:
    """Share of shorter lengths -> length in tokens, for the shares that are known, with 0 and 1 among them. Between two of
    them lengths are log-uniform."""

    known: Mapping[float, float]

    @property
    def mean(self) -> float:
        points = sorted(self.known.items())
        return sum(
            (after - before) * ((high - low) / math.log(high / low) if high > low else low)
            for (before, low), (after, high) in pairwise(points)
        )

    def at(self, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
        shares, lengths = zip(*sorted(self.known.items()), strict=True)
        return np.rint(np.exp(np.interp(uniform, shares, np.log(lengths)))).astype(np.int64)
