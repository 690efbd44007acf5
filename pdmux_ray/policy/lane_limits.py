"""What a planner of lanes is told once, when the engine starts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from pdmux_ray.policy.decisions import ModeReason
from pdmux_ray.types import Mode, Split


class UnitRule(Protocol):
    """A choice of units and layers that looks at no time: `FixedRule`, or a published table."""

    @property
    def reason(self) -> ModeReason:
        """What its steps give as theirs."""

    def choose(self, decode_batch: int, new_tokens: int, layers: int) -> tuple[Split, int]:
        """For a step that decodes `decode_batch` requests (0: none) beside a prefill of `new_tokens`: its split, one of the
        device's, and how many of the model's `layers` the prefill runs, 1 to `layers`."""


@dataclass(frozen=True, slots=True)
class FixedRule:
    """The same split and the same number of layers for every step."""

    split: Split
    block_layers: int | None = None  # None: all

    @property
    def reason(self) -> ModeReason:
        return ModeReason.CONFIGURED

    def choose(self, decode_batch: int, new_tokens: int, layers: int) -> tuple[Split, int]:
        return self.split, layers if self.block_layers is None else min(self.block_layers, layers)


@dataclass(frozen=True, slots=True)
class LaneLimits:
    """How steps may be made up. Raises ValueError for PREFILL_FIRST, and for a rule in a mode that predicts.

    CHUNKED is here what AUTO may choose, alone; the configured mode of that name is planned by `policy.batching`. What has a
    default below has no key in the configuration, but for `itl_s` and `rule`, which need not be there.
    """

    mode: Mode
    max_batch: int  # requests that hold pages at once
    max_prefill_tokens: int  # of a job of several prompts, and of a chunk; a job of one prompt may be longer
    itl_s: float = math.inf  # the objective that the 99 % bound of a step must meet
    rule: UnitRule | None = None  # None: units and layers by predicted time
    share_s: float = 0.25  # several prompts share a job while it is predicted to take no longer
    # A block's length while nobody decodes, and a burst's while nobody is prefilled: how late an arrival is looked at.
    idle_block_s: float = 0.05
    overtakes: int = 16  # how many later jobs may run before one that has begun
    patience_s: float = 10.0  # a request that will miss its TTFT objective lets pass whoever is due less than this after it
    dwell: float = 10.0  # a mode stays for so many times what a change costs, unless the next one gains more than that cost
    most_steps: int = 1  # decode steps that the device takes at once; it says so itself

    def __post_init__(self) -> None:
        if self.mode is Mode.PREFILL_FIRST:
            raise ValueError("prefill_first has no lanes: policy.batching plans its steps")
        if self.mode in (Mode.AUTO, Mode.CHUNKED) and self.rule is not None:
            raise ValueError(f"{self.mode.value} goes by predicted times, so it takes no rule that looks at none")
