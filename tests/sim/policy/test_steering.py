"""A fleet in small: what each policy makes of the same requests, on instances that take exactly what their cost model says."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from random import Random

import pytest

from pdmux_ray.policy.fake_costs import FakeCosts
from pdmux_ray.policy.routing import RouteAsk, choose_route
from pdmux_ray.policy.views import InstanceCosts, InstanceView, Piece
from pdmux_ray.types import Role, RoutePolicy
from tests.unit.policy.routes import LIMITS, WELL

TICK_S = 0.02
FLEET = (Role.PREFILL, Role.MUX)
COSTS = FakeCosts(units=1)  # about the demo model, a core each
LIMITS_HERE = replace(LIMITS, threshold_tokens=256, kv_bytes_per_token=46_080, bandwidth=2e9)


@dataclass(eq=False)
class Asked:
    tokens: int
    output: int
    arrival_s: float
    ttft_s: float
    prefill_s: float  # that is left of it, on a device that does nothing else
    decoder: Instance
    made: float = 0.0  # tokens
    good: bool = False

    @property
    def due_s(self) -> float:
        return self.arrival_s + self.ttft_s


@dataclass(eq=False)
class Instance:
    """With lanes: a prefill has what the decodes leave of each interval of the ITL objective, the most urgent one first."""

    name: str
    role: Role
    queue: list[Asked] = field(default_factory=list)
    decoding: list[Asked] = field(default_factory=list)
    coming: int = 0  # requests that are prefilled, here or elsewhere, and will decode here

    @property
    def context(self) -> int:
        return int(sum(asked.tokens + asked.made for asked in self.decoding))

    def view(self) -> InstanceView:
        queued = (
            sum(asked.prefill_s for asked in self.queue)
            / COSTS.prefill((Piece(512, 0),), 30, 1, 0, last=True).predicted_s
            * 512
        )
        return replace(
            WELL,
            instance_id=self.name,
            role=self.role,
            free_pages=10_000,
            running=len(self.decoding) + self.coming,
            decode_batch=len(self.decoding),
            decode_context_tokens=self.context,
            queued_prefill_tokens=int(queued),
        )

    def tick(self, now_s: float) -> None:
        step = COSTS.decode(len(self.decoding), self.context, 1, 0)
        share = max(1 - step.bound_s / LIMITS.itl_s, 0.1) if self.decoding else 1.0
        gap_s = max(LIMITS.itl_s, step.predicted_s / 0.9) if self.queue else step.predicted_s
        for asked in list(self.decoding):
            asked.made += TICK_S / gap_s
            asked.good &= gap_s <= LIMITS.itl_s
            if asked.made >= asked.output:
                self.decoding.remove(asked)
        if self.queue:
            first = min(self.queue, key=lambda asked: asked.due_s)
            first.prefill_s -= TICK_S * share
            if first.prefill_s <= 0:
                self.queue.remove(first)
                first.good = now_s <= first.due_s
                first.decoder.decoding.append(first)
                first.decoder.coming -= 1


def arrivals(rate: float, until_s: float, rng: Random) -> list[tuple[float, int, int]]:
    """(when, prompt tokens, output tokens): of ten prompts nine are short."""
    found, now_s = [], rng.expovariate(rate)
    while now_s < until_s:
        tokens = rng.randint(1200, 2000) if rng.random() < 0.1 else rng.randint(30, 200)
        found.append((now_s, tokens, rng.randint(32, 128)))
        now_s += rng.expovariate(rate)
    return found


@cache
def good_share(policy: RoutePolicy, rate: float) -> float:
    """Of requests whose first token and whose gaps keep the objectives."""
    rng, limits = Random(5), replace(LIMITS_HERE, policy=policy)
    fleet = {name: Instance(name, role) for name, role in zip("pm", FLEET, strict=True)}
    costs = {name: InstanceCosts(COSTS, layers=30, units=1) for name in fleet}
    coming, asked = arrivals(rate, 100.0, rng), list[Asked]()
    for tick in range(int(110.0 / TICK_S)):
        while coming and coming[0][0] <= tick * TICK_S:
            arrival_s, tokens, output = coming.pop(0)
            choice = choose_route(RouteAsk(tokens, {}), [i.view() for i in fleet.values()], limits, costs, rng)
            assert choice.instance_id is not None
            decoder, ttft_s = fleet[choice.instance_id], limits.ttft_s + limits.ttft_s_per_token * tokens
            alone_s = COSTS.prefill((Piece(tokens, 0),), 30, 1, 0, last=True).predicted_s
            asked.append(Asked(tokens, output, arrival_s, ttft_s, alone_s, decoder))
            decoder.coming += 1
            fleet[choice.prefill[0] if choice.prefill else choice.instance_id].queue.append(asked[-1])
        for instance in fleet.values():
            instance.tick(tick * TICK_S)
    return sum(request.good for request in asked) / len(asked)


@pytest.mark.parametrize("rate", [2.5, 3.2])
@pytest.mark.parametrize("other", ["threshold", "local", "remote"])
def test_predicting_makes_more_requests_good_than_a_fixed_rule(rate: float, other: RoutePolicy) -> None:
    assert good_share("predict", rate) > good_share(other, rate)


def test_predicting_makes_nearly_all_good_at_a_rate_that_a_fixed_rule_does_not_carry() -> None:
    assert good_share("predict", 2.5) > 0.95
