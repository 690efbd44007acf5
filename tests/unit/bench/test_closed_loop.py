from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmux_ray.bench.calibration.closed_loop import Fleet, Loop, apart, together


@dataclass(frozen=True)
class Constant:
    """A token of a prompt takes 1 ms, a decode step 10 ms, and a pass with decodes 1 ms more."""

    def decode_s(self, batch: int, context: int) -> float:
        return 0.01

    def pass_s(self, new: int, prompt: int, batch: int, context: int) -> float:
        return 1e-3 * new + 1e-3 * bool(batch)


ALONE = Loop(prompt=100, output=11, concurrency=1, requests=4, budget=1000, mixes=True, pool=1e9, reserved=1.0)
TIMES = Constant()


def test_alone_a_request_takes_its_prompt_s_pass_and_a_step_for_each_other_token() -> None:
    found = together(TIMES, ALONE)
    assert list(found.ttft_s) == pytest.approx([0.1] * 4)
    assert list(found.tpot_s) == pytest.approx([0.01] * 4)


def test_who_comes_at_once_goes_through_passes_of_the_budget_in_order() -> None:
    found = together(TIMES, replace(ALONE, concurrency=4, budget=200))
    assert list(found.ttft_s) == pytest.approx([0.2, 0.2, 0.401, 0.401])


def test_a_prompt_longer_than_the_budget_goes_through_in_pieces() -> None:
    assert list(together(TIMES, replace(ALONE, requests=1, budget=30)).ttft_s) == pytest.approx([0.1])


def test_decodes_get_a_token_in_a_pass_that_mixes_and_wait_for_one_that_does_not() -> None:
    mixed, apart_ = (together(TIMES, replace(ALONE, concurrency=2, budget=100, mixes=mixes)) for mixes in (True, False))
    assert max(mixed.tpot_s) == pytest.approx((0.101 + 9 * 0.01) / 10)
    assert max(apart_.tpot_s) == pytest.approx((0.1 + 10 * 0.01) / 10)


@pytest.mark.parametrize(("reserved", "waits"), [(1.0, True), (0.5, False)])
def test_without_room_in_the_pool_a_request_waits_for_the_end_of_another(reserved: float, waits: bool) -> None:
    found = together(TIMES, replace(ALONE, concurrency=2, requests=2, pool=213, reserved=reserved))
    assert (max(found.ttft_s) > 0.2) is waits


def test_a_request_that_fits_into_no_pool_is_served_alone() -> None:
    assert len(together(TIMES, replace(ALONE, concurrency=2, pool=1)).ttft_s) == 4


def test_an_engine_that_looks_rarely_finds_new_requests_later() -> None:
    often, rarely = (
        together(TIMES, replace(ALONE, concurrency=8, requests=80, output=60, shortest=0.5, look_every=every))
        for every in (1, 30)
    )
    assert sum(rarely.ttft_s) > sum(often.ttft_s) + 72 * 5 * 0.01


def test_prompts_go_to_the_prefill_engine_that_is_free_first() -> None:
    one, two = (apart(TIMES, TIMES, replace(ALONE, concurrency=4), Fleet(engines, 1, 0.005)) for engines in (1, 2))
    assert list(one.ttft_s) == pytest.approx([0.105, 0.205, 0.305, 0.405], abs=0.01)
    assert list(two.ttft_s) == pytest.approx([0.105, 0.105, 0.205, 0.205], abs=0.01)
    assert list(two.tpot_s) == pytest.approx([0.01] * 4)


@dataclass(frozen=True)
class ByBatch(Constant):
    def decode_s(self, batch: int, context: int) -> float:
        return 1e-3 * batch


def test_engines_that_decode_share_the_requests() -> None:
    loop = replace(ALONE, concurrency=8, requests=8, output=100)
    one, four = (apart(TIMES, ByBatch(), loop, Fleet(8, engines)) for engines in (1, 4))
    assert list(one.tpot_s) == pytest.approx([8e-3] * 8)
    assert list(four.tpot_s) == pytest.approx([2e-3] * 8)


LOOPS = st.builds(
    Loop,
    prompt=st.integers(1, 300),
    output=st.integers(1, 40),
    concurrency=st.integers(1, 9),
    requests=st.integers(1, 30),
    budget=st.integers(1, 400),
    mixes=st.booleans(),
    pool=st.integers(1, 2000),
    reserved=st.floats(0, 1),
    shortest=st.floats(0.1, 1),
    look_every=st.integers(1, 30),
)


@given(LOOPS, st.integers(1, 3), st.integers(1, 3))
def test_every_request_ends_once_and_alike_each_time(loop: Loop, prefills: int, decodes: int) -> None:
    for run in (lambda: together(TIMES, loop), lambda: apart(TIMES, TIMES, loop, Fleet(prefills, decodes))):
        found = run()
        assert len(found.ttft_s) == loop.requests
        assert len(found.tpot_s) <= loop.requests
        assert all(seconds > 0 for seconds in (*found.ttft_s, *found.tpot_s))
        assert found == run()
