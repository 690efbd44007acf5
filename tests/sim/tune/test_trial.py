"""One candidate at one rate, simulated on a small made-up device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmux_ray.costs.device import DeviceModel
from pdmux_ray.metrics.goodput import Slo
from pdmux_ray.tune.binding import Binds
from pdmux_ray.tune.candidates import PREDICT, REMOTE, Candidate, Topology
from pdmux_ray.tune.trial import SHORT, WARMUP, Changes, Trials
from pdmux_ray.types import Mode
from tests.sim.tune.small import MUX, SLO, SPLIT, setting
from tests.unit.sim.fleets import device


@pytest.fixture(scope="module")
def trials() -> Trials:
    return Trials(setting())


def test_a_rate_far_below_the_capacity_holds_and_uses_little(trials: Trials) -> None:
    found = trials.judge(MUX, 5.0)
    assert found.held(0.9)
    assert len(found.point.good) == 40 - 40 // WARMUP
    assert 0 < found.uses.prefill < 0.3
    assert 0 < found.uses.kv < 0.5
    assert found.uses.link == 0


def test_a_hopeless_rate_costs_a_part_of_a_run() -> None:
    found = Trials(setting(requests=200)).judge(MUX, 2000.0)
    assert not found.held(0.9)
    assert found.clear
    assert len(found.point.good) == 200 // SHORT - 200 // WARMUP


def test_a_rate_at_which_the_queue_grows_does_not_hold_though_the_run_is_too_short_for_anybody_to_be_late() -> None:
    patient = replace(setting(requests=200), slo=Slo(ttft_s=500.0, itl_s=5.0))
    found = Trials(patient).judge(MUX, 2000.0)
    assert found.good_enough(0.9)
    assert found.falls_behind
    assert not found.held(0.9)
    assert not found.clearly_failed(0.9)


def test_the_part_of_a_run_is_its_beginning(trials: Trials) -> None:
    whole, part = trials.run(MUX, 20.0), trials.run(MUX, 20.0, part=2)
    assert list(part.point.good) == list(whole.point.good[: len(part.point.good)])


def test_equal_trials_are_equal_and_another_seed_gives_other_requests() -> None:
    first, again = (Trials(setting()).run(SPLIT, 20.0) for _ in range(2))
    assert first == again
    assert Trials(replace(setting(), seed=4)).run(SPLIT, 20.0).summary != first.summary


def test_skipped_requests_are_not_sent() -> None:
    found = Trials(replace(setting("sharegpt", 20), skip=5)).run(MUX, 1.0)
    lengths = [ask.output_tokens for ask in setting("sharegpt").workload.asks(25, 3)][5:]
    assert found.summary.requests == 20 - 20 // WARMUP
    assert found.summary.output_tokens == sum(length or 0 for length in lengths[20 // WARMUP :])


def test_who_waits_for_the_one_that_prefills_is_bound_by_prefill() -> None:
    found = Trials(setting("fixed:20,2", requests=200)).run(SPLIT, 1000.0)
    assert max(found.causes, key=lambda cause: found.causes[cause]) is Binds.PREFILL
    assert found.uses.prefill > found.uses.decode


def test_a_link_that_takes_most_of_the_time_that_is_allowed_binds(trials: Trials) -> None:
    """100 tokens of 128 bytes each: a quarter of a second at so small a part of the link."""
    found = trials.run(SPLIT, 1.0, Changes(assume=(("link", 0.005),)))
    assert set(found.causes) == {Binds.LINK}
    assert found.uses.link > 0.2


def test_a_link_that_is_never_free_binds_however_short_each_transfer_is() -> None:
    """A fiftieth of a second each, of all from one sender: 60 are more than a second has."""
    candidate = Candidate(Topology(1, 1, 0, 2), Mode.AUTO, REMOTE)
    found = Trials(setting(requests=200)).run(candidate, 60.0, Changes(assume=(("link", 0.064),)))
    assert max(found.causes, key=lambda cause: found.causes[cause]) is Binds.LINK
    assert found.uses.link > 0.9 > found.uses.prefill


def test_gaps_that_are_too_long_are_bound_by_decodes() -> None:
    tight = replace(setting("fixed:4,30"), slo=replace(SLO, itl_s=0.006))
    found = Trials(tight).run(Candidate(Topology(1, 1, 0, 1), Mode.AUTO, PREDICT), 30.0)
    assert set(found.causes) == {Binds.DECODE}


def test_a_full_pool_binds() -> None:
    def tiny(tp: int, changes: tuple[tuple[str, float], ...]) -> DeviceModel:
        return replace(device(), layout=replace(device().layout, pages=60))

    found = Trials(replace(setting("fixed:20,20", requests=100), device=tiny)).run(MUX, 300.0)
    assert max(found.causes, key=lambda cause: found.causes[cause]) is Binds.KV_MEMORY
    assert found.uses.kv > 0.9
