from __future__ import annotations

import pytest

from pdmux_ray.sim.events import StepClock, Turn, World


def test_events_happen_in_order_of_time_and_then_of_planning() -> None:
    world, seen = World(), list[tuple[str, float]]()
    for time_s, name in ((2.0, "late"), (1.0, "first"), (1.0, "second")):
        world.at(time_s, lambda name=name: seen.append((name, world.now())))  # type: ignore[misc]
    assert not world.run(lambda: False)
    assert seen == [("first", 1.0), ("second", 1.0), ("late", 2.0)]


def test_at_the_same_time_requests_come_first_and_steps_begin_last() -> None:
    world, seen = World(), list[str]()
    for turn in (Turn.STEP, Turn.NEWS, Turn.ARRIVAL):
        world.at(1.0, lambda turn=turn: seen.append(turn.name), turn)  # type: ignore[misc]
    world.run(lambda: False)
    assert seen == ["ARRIVAL", "NEWS", "STEP"]
    assert world.happened == 3


def test_it_ends_when_it_is_done_or_at_the_limit() -> None:
    world, seen = World(), list[float]()
    for time_s in (1.0, 2.0, 3.0):
        world.at(time_s, lambda: seen.append(world.now()))
    assert world.run(lambda: len(seen) == 1)
    assert not world.run(lambda: False, limit_s=2.5)
    assert seen == [1.0, 2.0]


def test_nothing_is_planned_for_the_past() -> None:
    world = World()
    world.at(1.0, lambda: None)
    world.run(lambda: False)
    with pytest.raises(ValueError, match="nothing can be planned"):
        world.at(0.5, lambda: None)


def test_a_step_is_ahead_of_the_world_until_it_ends() -> None:
    world = World()
    clock = StepClock(world)
    clock.sleep(0.5)
    clock.sleep(0.25)
    assert (clock.now(), world.now()) == (0.75, 0.0)
    assert clock.step_ends() == 0.75
    assert clock.now() == 0.0
