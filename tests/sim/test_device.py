"""How a simulated device goes through the recorded pace of a machine."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from pdmux_ray.costs.device import HostTimes
from pdmux_ray.costs.pace import Pace
from pdmux_ray.engine.timeline import Step
from pdmux_ray.sim.fleet import Run, simulate
from tests.unit.sim.fleets import config, device, stream

STALL = Pace((0.0, 0.9), (0.0, 0.9), 1.0, 0.92)  # a fifth as fast for a tenth of each second


def run(seed: int = 0, coalesce: bool = True, pace: Pace | None = STALL, host_s: float = 0.0) -> Run:
    model = replace(device(), pace=pace, host=HostTimes(host_s, host_s))
    return simulate(config(0, 1), model, stream([(9, 300), (40, 90)], 0.7), seed=seed, spread=0.0, coalesce=coalesce)


def steps(found: Run) -> list[Step]:
    (engine,) = found.engines.values()
    return [record for record in engine.timeline.since(0, most=100_000) if isinstance(record, Step)]


def tokens(found: Run) -> list[list[float]]:
    return [life.token_s.tolist() for life in found.lifelines]


def test_steps_are_slow_while_the_machine_stalls_and_only_then() -> None:
    usual_s = max(step.end_s - step.begin_s for step in steps(run(pace=None)))
    slow = [step for step in steps(run()) if step.end_s - step.begin_s > 1.2 * usual_s]
    gaps_s = [after.begin_s - before.begin_s for before, after in pairwise(slow)]
    assert len(slow) > 6
    assert all(gap_s < 0.11 or gap_s > 0.8 for gap_s in gaps_s)  # together, once a second


def test_seeds_begin_at_other_moments_and_a_seed_always_at_the_same() -> None:
    assert tokens(run(1)) == tokens(run(1)) != tokens(run(2))


@pytest.mark.parametrize("host_s", [0.0, 0.001])
def test_steps_that_are_taken_at_once_take_what_they_take_one_by_one(host_s: float) -> None:
    at_once, one_by_one = run(3, True, host_s=host_s), run(3, False, host_s=host_s)
    assert tokens(at_once) == tokens(one_by_one)
    assert steps(at_once) == steps(one_by_one)
    assert at_once.events < one_by_one.events


def test_the_host_takes_its_time_after_each_step() -> None:
    without, with_host = (tokens(run(pace=None, host_s=host_s))[0] for host_s in (0.0, 0.002))
    begin, end = 260, 290  # of decodes alone
    assert with_host[end] - with_host[begin] == pytest.approx(without[end] - without[begin] + 30 * 0.002)
