"""How many devices the two phases of a fleet's work want, from what its instances did lately and have to do. Pure.

    prefill   (tokens computed a second + tokens queued / CLEAR_S) * seconds a token of the mean prompt takes
    decode    the larger one of   tokens generated a second / (B / s)   and   requests that decode / B
              B: requests that one device decodes at once within the ITL objective, its pool and max_batch; s: their step

but at most MOST times what is done now, or one device where that is more. A want of 2.3 for 3 instances keeps each of them
busy for 77 % of the time, if they share it evenly. What was computed says no more than what the fleet can do: what it cannot
shows in the queue, and in requests that decode or wait to. Queues alone mislead: in a fleet that cannot carry its load,
whichever side is given more makes the other side's queue grow, and by queues the roles would go to and fro for ever.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from pdmux_ray.policy.views import CostModel, Piece

CLEAR_S = 10.0  # in which a queue of prompts should be done
MOST = 2.0  # times what is done now: no phase is thought to want more
ALWAYS = 1.0  # devices that a phase may want of which nothing was done lately
PROMPT_TOKENS = 512  # of the mean prompt, while nothing says how long it is
LONGEST_TOKENS = 8192  # a mean is thought to be no more: beyond it the figures are of too few requests


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """Of all instances together. Rates are those of the last seconds, a second; requests that fetch their KV are `running`."""

    taken_s: float  # when the oldest of them was true, on the clock of who decides
    prefill_tokens_per_s: float  # computed: without those that a prefix cache had
    generated_tokens_per_s: float
    finished_per_s: float  # requests
    queued_prefill_tokens: float
    decoding: float  # requests
    decode_context_tokens: float  # of those, all together
    running: float  # requests that hold pages where it is not only prefilled
    waiting: float  # requests that wait there


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one instance can do; all of a fleet are alike."""

    costs: CostModel
    layers: int
    units: int
    max_batch: int  # requests that hold pages at once
    pool_tokens: int
    itl_s: float  # infinite without an objective

    def batch(self, context_tokens: float) -> int:
        """Requests of such a mean context that it decodes at once. At least 1."""
        most = max(min(self.max_batch, int(self.pool_tokens / max(context_tokens, 1.0))), 1)

        def bound_s(batch: int) -> float:
            return self.costs.decode(batch, int(batch * context_tokens), self.units, 0).bound_s

        return max(bisect_right(range(1, most + 1), self.itl_s, key=bound_s), 1)


@dataclass(frozen=True, slots=True)
class Demand:
    """Devices that each phase wants."""

    taken_s: float  # of the figures it is from
    prefill: float
    decode: float


def demand_of(figures: FleetFigures, of: Capacity) -> Demand:
    """What these figures want of such instances, by the formulas above."""
    prompt = PROMPT_TOKENS
    if figures.finished_per_s > 0:
        prompt = round(min(max(figures.prefill_tokens_per_s / figures.finished_per_s, 1.0), LONGEST_TOKENS))
    token_s = of.costs.prefill((Piece(prompt, 0),), of.layers, of.units, 0, last=True).predicted_s / prompt
    done = figures.prefill_tokens_per_s * token_s
    prefill = _at_most(done + figures.queued_prefill_tokens / CLEAR_S * token_s, done)
    context = figures.decode_context_tokens / figures.decoding if figures.decoding else float(prompt)
    batch = of.batch(context)
    step_s = of.costs.decode(batch, int(batch * context), of.units, 0).predicted_s
    by_rate = figures.generated_tokens_per_s * step_s / batch
    return Demand(figures.taken_s, prefill, _at_most(max(by_rate, _wanting(figures) / batch), by_rate))


def _at_most(wanted: float, done: float) -> float:
    """Both in devices."""
    return min(wanted, max(MOST * done, ALWAYS))


def _wanting(figures: FleetFigures) -> float:
    """Requests that decode, and of those that wait the same share as of those that hold pages: behind prompts whose KV is long
    in coming more wait, too, and they are no sign that anything is short of decodes."""
    return figures.decoding * (1 + figures.waiting / max(figures.running, 1.0))
