"""Trials in processes of their own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

import pytest

from pdmux_ray.bench.tune_runs import WorkerLostError, workers
from pdmux_ray.errors import ConfigError
from pdmux_ray.tune.candidates import Space
from pdmux_ray.tune.estimate import Work
from pdmux_ray.tune.search import Job, Outcome, Search
from pdmux_ray.tune.standing import conclusion
from pdmux_ray.types import Mode
from tests.sim.tune.small import MUX, SPLIT, setting

SPACE = Space(2, (1,), (Mode.AUTO,), ())


def searched(count: int) -> Outcome:
    """All of a search, on requests so few that it takes no time."""
    chosen_by = setting("fixed:20,2", requests=20)
    with workers(chosen_by, replace(chosen_by, seed=4), count) as submit:
        return Search(SPACE, {1: Work(0.01, 0.005)}, submit, 0.9, count).run()


def test_a_search_on_two_workers_gives_the_same_answer_again() -> None:
    first, again = searched(2), searched(2)
    assert first == again
    assert conclusion(first.confirmed) == conclusion(again.confirmed)
    assert first.winner.held is not None


def test_what_is_told_is_of_whole_runs_though_a_part_would_show_that_they_do_not_hold() -> None:
    chosen_by = setting(requests=200)
    with workers(chosen_by, chosen_by, 1) as submit:
        part, whole = (submit(Job(MUX, 2000.0, fresh=fresh)).result() for fresh in (False, True))
    assert len(part.point.good) < len(whole.point.good) == 180


def refused(tp: int, changes: object) -> NoReturn:
    raise ConfigError("no such device")


def killed(tp: int, changes: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def on_two(device: Callable[[int, object], NoReturn]) -> None:
    of = replace(setting(), device=device)
    with workers(of, of, 2) as submit:
        for pending in [submit(Job(each, 5.0)) for each in (MUX, SPLIT)]:
            pending.result()


def test_what_a_trial_raises_in_its_process_ends_the_search_with_that() -> None:
    with pytest.raises(ConfigError, match="no such device"):
        on_two(refused)


def test_a_process_that_is_killed_ends_the_search_with_an_error_that_says_what_may_help() -> None:
    with pytest.raises(WorkerLostError, match="fewer --workers"):
        on_two(killed)
