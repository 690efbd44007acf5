"""What an instance of a simulated fleet runs on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kv_transfer.layout import KVLayout
from pdmux_ray.costs.pace import Pace
from pdmux_ray.policy.views import CostModel
from pdmux_ray.types import Split


class StepFactors(Protocol):
    """How many times as long steps take as `DeviceModel.costs` predicts: a server has more to do than a profile measures."""

    def of(self, kind: str, units: int, beside: int, predicted_s: float, decodes: int) -> float:
        """`kind`: decode, prefill (a block), or mixed (in one pass); `beside`: units of the other lane, 0 when it is alone;
        `decodes`: requests."""
        ...


@dataclass(frozen=True, slots=True)
class Slower:
    """A `StepFactors` by kind."""

    decode: float = 1.0
    prefill: float = 1.0
    mixed: float = 1.0

    def of(self, kind: str, units: int, beside: int, predicted_s: float, decodes: int) -> float:
        return self.mixed if kind == "mixed" else self.decode if kind == "decode" else self.prefill

    def __str__(self) -> str:
        return f"decode {self.decode:g}, prefill {self.prefill:g}, one pass {self.mixed:g}"


@dataclass(frozen=True, slots=True)
class HostTimes:
    """What the host takes before it launches something, while there is work and neither lane does any."""

    step_s: float = 0.0
    lanes_s: float = 0.0  # a block, or a step beside one


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """What an instance runs on."""

    name: str
    costs: CostModel  # what policies are told before they have seen any step
    layout: KVLayout  # of its pool
    units: int
    splits: tuple[Split, ...]  # the disjoint ones, fewest decode units first
    link_bytes_per_s: float  # of a transfer to another instance
    slower: StepFactors = Slower()
    pace: Pace | None = None  # how step times change with time; without: see `CostDevice`
    host: HostTimes = HostTimes()

    @property
    def kv_bytes_per_token(self) -> int:
        return self.layout.layers * 2 * self.layout.page_bytes // self.layout.page_size
