from __future__ import annotations

import math
import random

import pytest

from pdmux_ray.latency.correction import CorrectedCosts
from pdmux_ray.latency.profile import Profile
from pdmux_ray.latency.replay import Timed, profiled_s
from pdmux_ray.policy.views import Piece


def served(profile: Profile, steps: int) -> tuple[list[Timed], list[float], CorrectedCosts]:
    """Decodes alone, which become ever slower, and now and then a block beside some; what the profile says of each."""
    base, costs, rng = profile.costs(), CorrectedCosts(profile.costs()), random.Random(3)
    told, truth = list[Timed](), list[float]()
    for step in range(steps):
        slow = (1.1 + 0.4 * step / steps) * rng.lognormvariate(0.0, 0.1)
        if step % 7 == 0:
            work = ([Piece(200, 0)], 2, 1, 1, True)
            one_s, seen_s = base.prefill(*work).predicted_s, costs.prefill(*work).predicted_s
            told.append(Timed("prefill", 1, 1, 0.8 * slow * one_s, seen_s))
            costs.observe_prefill(*work, 0.8 * slow * one_s)
        else:
            one_s, seen_s = base.decode(4, 800, 2, 0).predicted_s, costs.decode(4, 800, 2, 0).predicted_s
            told.append(Timed("decode", 2, 0, slow * one_s, seen_s))
            costs.observe_decode(4, 800, 2, 0, slow * one_s)
        truth.append(one_s)
    return told, truth, costs


@pytest.mark.parametrize("kept", [1000, 400])  # of the steps, the latest
def test_what_the_profile_says_is_found_from_what_the_server_told_and_learned(profile: Profile, kept: int) -> None:
    told, truth, costs = served(profile, 1000)
    found = profiled_s(told[-kept:], costs.lessons(), profile.costs())
    off = [math.log(one / true) for one, true in zip(found, truth[-kept:], strict=True)]
    assert max(map(abs, off)) < 0.02
    told_off = [math.log(step.predicted_s / true) for step, true in zip(told, truth, strict=True)]
    assert max(told_off) > 0.3  # by what it is not


def test_nothing_is_found_of_nothing(profile: Profile) -> None:
    assert profiled_s([], CorrectedCosts(profile.costs()).lessons(), profile.costs()) == []
