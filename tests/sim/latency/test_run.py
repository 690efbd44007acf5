"""A whole profile of a device whose laws are known."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from pdmux_ray.clock import VirtualClock
from pdmux_ray.latency.design import design
from pdmux_ray.latency.identity import ProfileMismatchError
from pdmux_ray.latency.measure import PointBench
from pdmux_ray.latency.others import busy_s
from pdmux_ray.latency.partial import Partial
from pdmux_ray.latency.plots import decode_chart
from pdmux_ray.latency.profile import Profile, require_quality
from pdmux_ray.latency.run import TRIES, measure_all, run
from pdmux_ray.policy.views import Piece

from .lawful import IDENTITY, LIMITS, Law, LawfulRunner, machine


@pytest.mark.parametrize(("batch", "context"), [(1, 100), (3, 2000), (7, 700), (16, 5000)])
@pytest.mark.parametrize(("units", "beside"), [(1, 0), (2, 0), (1, 1), (2, 1)])
def test_decode_steps_are_predicted(profile: Profile, law: Law, batch: int, context: int, units: int, beside: int) -> None:
    estimate = profile.costs().decode(batch, context, units, beside)
    assert estimate.predicted_s == pytest.approx(law.decode_s(batch, context, units, beside), rel=0.08)
    assert estimate.bound_s < 1.6 * estimate.predicted_s


@pytest.mark.parametrize("pieces", [[Piece(20, 0)], [Piece(300, 0)], [Piece(150, 2000)], [Piece(60, 0), Piece(90, 500)]])
@pytest.mark.parametrize(("units", "beside"), [(1, 0), (2, 0), (1, 1), (1, 2)])
def test_whole_prefills_are_predicted(profile: Profile, law: Law, pieces: list[Piece], units: int, beside: int) -> None:
    predicted_s = profile.costs().prefill(pieces, law.layers, units, beside, last=True).predicted_s
    assert predicted_s == pytest.approx(law.block_s(pieces, law.layers, True, units, beside), rel=0.12)


@pytest.mark.parametrize(("batch", "context", "new"), [(0, 0, 200), (4, 1000, 100), (12, 4000, 40)])
def test_steps_in_one_pass_are_predicted(profile: Profile, law: Law, batch: int, context: int, new: int) -> None:
    predicted_s = profile.costs().mixed(batch, context, [Piece(new, 0)], law.units).predicted_s
    assert predicted_s == pytest.approx(law.mixed_s(batch, context, [Piece(new, 0)]), rel=0.08)


def test_what_does_not_shrink_with_the_units_is_told_from_what_does(profile: Profile, law: Law) -> None:
    assert profile.parameters.decode.fixed_s == pytest.approx(law.fixed_s, rel=0.5)
    assert profile.parameters.decode.terms[0][0] == pytest.approx(law.weights_s, rel=0.1)


def test_the_design_is_the_same_for_the_same_seed_and_within_the_limits() -> None:
    points = design(LIMITS)
    assert points == design(LIMITS)
    assert points != design(LIMITS, seed=1)
    for point in points:
        assert len(point.contexts) <= LIMITS.max_batch
        held = [*point.contexts, *(sum(piece) for piece in point.pieces)]
        assert max(held) < LIMITS.context_length
        assert min(held) > 0
        assert sum(-(-tokens // LIMITS.page_size) for tokens in held) * LIMITS.page_size <= LIMITS.pool_tokens


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path) -> None:
    partial, clock = tmp_path / "p.partial", VirtualClock()
    with pytest.raises(KeyboardInterrupt):
        run(LawfulRunner(Law(), clock, stop_after=800), LIMITS, IDENTITY, partial, machine(clock))
    lines = partial.read_text().splitlines()
    partial.write_text("\n".join(lines) + '\n{"point": 3, "reco')  # killed while it wrote
    told: list[tuple[float, float, str]] = []
    profile, kept = run(
        LawfulRunner(Law(), clock), LIMITS, IDENTITY, partial, machine(clock, tell=lambda *now: told.append(now))
    )
    assert 20 < len(lines) < len(design(LIMITS))
    assert len(kept.done) == len(design(LIMITS)) == len(told) - 1 + len(lines) - 1
    assert told[-1][0] == pytest.approx(told[-1][1])
    assert profile.took_s == pytest.approx(kept.took_s)
    resumed = [json.loads(line)["point"] for line in partial.read_text().splitlines()[len(lines) + 1 :]]
    assert not set(resumed) & {json.loads(line)["point"] for line in lines[1:]}
    kept.remove()
    assert not partial.exists()


def test_what_another_model_left_is_not_gone_on_with(tmp_path: Path) -> None:
    partial, clock = tmp_path / "p.partial", VirtualClock()
    with pytest.raises(KeyboardInterrupt):
        run(LawfulRunner(Law(), clock, stop_after=300), LIMITS, IDENTITY, partial, machine(clock))
    other = IDENTITY.model_copy(update={"dtype": "float32"})
    with pytest.raises(ProfileMismatchError, match=r"dtype: profiled 'bfloat16', here 'float32'\nRemove it"):
        run(LawfulRunner(Law(), clock), LIMITS, other, partial, machine(clock))


def test_a_device_with_one_unit_is_profiled_in_turns_and_in_one_pass(tmp_path: Path) -> None:
    law, clock = Law(units=1), VirtualClock()
    one = replace(LIMITS, units=1, splits=())
    profile, _ = run(LawfulRunner(law, clock), one, IDENTITY, tmp_path / "p", machine(clock))
    require_quality(profile)
    costs = profile.costs()
    assert costs.decode(4, 800, 1, 0).predicted_s == pytest.approx(law.decode_s(4, 800, 1, 0), rel=0.08)
    whole = [Piece(300, 0)]
    assert costs.prefill(whole, law.layers, 1, 0, last=True).predicted_s == pytest.approx(
        law.block_s(whole, law.layers, True, 1, 0), rel=0.12
    )
    assert costs.mixed(4, 800, whole, 1).predicted_s == pytest.approx(law.mixed_s(4, 800, whole), rel=0.1)
    assert {(point.units, point.beside) for point in profile.points} == {(1, 0)}
    assert [key.label for key in decode_chart(profile).legend] == ["1 units"]


def test_what_others_disturbed_is_measured_again_and_the_calmer_attempt_counts(tmp_path: Path) -> None:
    clock, quiet_from_s = VirtualClock(), 10.0
    runner, points = LawfulRunner(Law(noise=0.0), clock), design(LIMITS)[:60]
    runner.slow_until_s = quiet_from_s
    kept = Partial(tmp_path / "p.partial", IDENTITY, LIMITS)
    measure_all(PointBench(runner, clock), points, kept, machine(clock, lambda: min(clock.now(), quiet_from_s)))
    twice = list(kept.tries.values()).count(2)
    assert 3 < twice < len(points)
    assert [kept.tries[point] for point in range(len(points))] == [2] * twice + [1] * (len(points) - twice)
    assert all(attempt.others < 0.05 for attempt in kept.done.values())
    again = Partial(tmp_path / "p.partial", IDENTITY, LIMITS)
    assert (again.done, again.tries) == (kept.done, kept.tries)


def test_on_a_machine_that_is_never_idle_the_tries_end(tmp_path: Path) -> None:
    clock, points = VirtualClock(), design(LIMITS)[:12]
    kept = Partial(tmp_path / "p.partial", IDENTITY, LIMITS)
    measure_all(PointBench(LawfulRunner(Law(), clock), clock), points, kept, machine(clock, clock.now))
    assert set(kept.tries.values()) == {TRIES}
    assert all(attempt.others == pytest.approx(0.5) for attempt in kept.done.values())


def test_cpu_time_of_everybody_is_that_of_the_cores_asked_for() -> None:
    stat = "cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 100 10 20 5000 7 1 2 3 0 0\ncpu1 1000 0 0 0 0 0 0 0 0 0\nintr 5\n"
    ticks = os.sysconf("SC_CLK_TCK")
    assert busy_s(stat, {0}) == pytest.approx(136 / ticks)
    assert busy_s(stat, {0, 1}) == pytest.approx(1136 / ticks)
