"""The work that servers of a small model on two cores are compared with: published shapes made shorter, and a mix of two.

docs/workloads.md says where the shapes come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from pdmux_ray.bench.cli import TOKEN_IDS
from pdmux_ray.workload.requests import Ask, Workload
from pdmux_ray.workload.scaling import Scaling
from pdmux_ray.workload.source import load_workload

# workload -> what its lengths are divided by, so that two cores and a small model do a request in fractions of a second
SHAPES = {"sharegpt": 4.0, "loogle": 16.0, "openthoughts": 128.0, "tool-agent": 32.0}
MAX_CONTEXT = 2048
MIN_OUTPUT_TOKENS = 8  # a shorter one has no ITL to speak of
SLO = "ttft=5x,itl=3x"  # times what an idle server takes
EVERY = 3  # request of the mix is a long one


def scaled(name: str) -> Workload:
    """One of SHAPES, shorter; any other workload of `pdmux bench` with its own lengths. Raises ConfigError."""
    scaling = Scaling(divide=SHAPES.get(name, 1.0), max_context=MAX_CONTEXT, min_output_tokens=MIN_OUTPUT_TOKENS)
    return load_workload(name, scaling=scaling, token_ids=TOKEN_IDS)


@dataclass(frozen=True)
class Mixed:
    """A `Workload`: of `every` requests one is of `long`, the others of `short`, each in its own order."""

    short: Workload
    long: Workload
    every: int = EVERY
    scattered: bool = False  # the long one is anywhere among them, not the last one

    @property
    def name(self) -> str:
        return f"{self.short.name} with {self.long.name}"

    @property
    def description(self) -> Sequence[str]:
        which = "one at random" if self.scattered else "the last one"
        rule = f"Of {self.every} requests in a row {which} is of {self.long.name}."
        return [rule, *self.short.description, *self.long.description]

    def asks(self, count: int, seed: int) -> list[Ask]:
        """Raises ConfigError when either has fewer."""
        longs = iter(self.long.asks(count // self.every + 1, seed))
        shorts = iter(self.short.asks(count, seed))
        rng, last = Random(f"places {seed}"), self.every - 1
        rows = range(0, count, self.every)
        places = {first + (rng.randrange(self.every) if self.scattered else last) for first in rows}
        return [next(longs if index in places else shorts) for index in range(count)]


def mixed() -> Mixed:
    """Chats, and every third request a long prompt with a short answer."""
    return Mixed(scaled("sharegpt"), scaled("loogle"))
