from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmux_ray.bench.calibration.closed_loop import Fleet, Latencies, Loop, apart, together


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


def test_with_a_place_fewer_than_clients_one_of_them_waits_for_the_end_of_another() -> None:
    """In each round of two the third one: 0.3 s of the prompts, and ten steps."""
    loop = replace(ALONE, concurrency=3, requests=300)
    enough, short = (sum(together(TIMES, replace(loop, slots=slots)).ttft_s) / 300 for slots in (3, 2))
    assert enough == pytest.approx(0.3, rel=0.02)
    assert short == pytest.approx(0.2 + (0.2 + 10 * 0.01) / 2, rel=0.02)


def test_lengths_are_around_those_that_are_told() -> None:
    found = together(TIMES, replace(ALONE, requests=400, shortest=0.8, longest=1.2))
    assert [min(found.ttft_s), max(found.ttft_s)] == pytest.approx([0.08, 0.12])
    assert sum(found.ttft_s) / 400 == pytest.approx(0.1, rel=0.02)


def test_a_request_that_fits_into_no_pool_is_served_alone() -> None:
    assert len(together(TIMES, replace(ALONE, concurrency=2, pool=1)).ttft_s) == 4


def test_an_engine_that_looks_rarely_finds_new_requests_later() -> None:
    often, rarely = (
        together(TIMES, replace(ALONE, concurrency=8, requests=80, output=60, shortest=0.5, look_every=every))
        for every in (1, 30)
    )
    assert sum(rarely.ttft_s) > sum(often.ttft_s) + 72 * 5 * 0.01


def test_the_front_hands_over_one_request_after_the_other_and_decodes_go_on_meanwhile() -> None:
    found = together(TIMES, replace(ALONE, concurrency=3, requests=3, accept_s=0.25, output=51))
    assert list(found.ttft_s) == pytest.approx([0.25 + 0.1, 0.5 + 0.101, 0.75 + 0.101], abs=0.011)
    assert found.tpot_s[0] == pytest.approx((48 * 0.01 + 2 * 0.101) / 50)
    fleet = apart(TIMES, TIMES, replace(ALONE, concurrency=3, requests=3, accept_s=0.25, output=51), Fleet(1, 1))
    assert list(fleet.ttft_s) == pytest.approx([0.35, 0.6, 0.85], abs=0.011)


SINGLY = replace(ALONE, concurrency=4, budget=100)


def test_prompts_go_to_the_prefill_engine_that_is_free_first() -> None:
    one, two = (apart(TIMES, TIMES, SINGLY, Fleet(engines, 1)) for engines in (1, 2))
    assert list(one.ttft_s) == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.01)
    assert list(two.ttft_s) == pytest.approx([0.1, 0.1, 0.2, 0.2], abs=0.01)
    assert list(two.tpot_s) == pytest.approx([0.01] * 4)


def test_an_engine_that_prefills_takes_what_waits_up_to_its_budget_in_a_pass() -> None:
    found = apart(TIMES, TIMES, replace(SINGLY, budget=200), Fleet(1, 1))
    assert list(found.ttft_s) == pytest.approx([0.2, 0.2, 0.4, 0.4], abs=0.01)
    whole = apart(TIMES, TIMES, replace(SINGLY, budget=30, requests=1), Fleet(1, 1))  # a prompt is in one pass
    assert list(whole.ttft_s) == pytest.approx([0.1])


def test_a_first_token_waits_for_all_of_the_prompt_s_kv_to_come() -> None:
    at_once, later = (apart(TIMES, TIMES, replace(SINGLY, concurrency=1), Fleet(1, 1, send_s)) for send_s in (0.0, 0.002))
    assert list(at_once.ttft_s) == pytest.approx([0.1] * 4)
    assert list(later.ttft_s) == pytest.approx([0.1 + 100 * 0.002] * 4)
    assert list(later.tpot_s) == pytest.approx([0.01] * 4)


@pytest.mark.parametrize(("pool", "waits"), [(2 * 201, False), (2 * 201 - 1, True), (1, True)])
def test_kv_is_sent_when_the_engines_that_decode_have_room_for_the_request(pool: float, waits: bool) -> None:
    """Of two prompts that are computed side by side, the second one has its first token after the end of the first one: of its
    100 further tokens, and then the transfer."""
    loop = replace(ALONE, concurrency=2, requests=2, output=101, pool=pool)
    found = apart(TIMES, TIMES, loop, Fleet(2, 1, 0.001))
    assert list(found.ttft_s) == pytest.approx([0.2, 0.2 + (1.0 + 0.1) * waits], abs=0.011)


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
    longest=st.floats(1, 1.5),
    slots=st.integers(1, 9),
    look_every=st.integers(1, 30),
    accept_s=st.sampled_from((0.0, 0.003, 0.5)),
)


@given(LOOPS, st.integers(1, 3), st.integers(1, 3))
def test_every_request_ends_once_and_alike_each_time(loop: Loop, prefills: int, decodes: int) -> None:
    fleet = Fleet(prefills, decodes, 0.001)
    runs: tuple[Callable[[], Latencies], ...] = (lambda: together(TIMES, loop), lambda: apart(TIMES, TIMES, loop, fleet))
    for run in runs:
        found = run()
        assert len(found.ttft_s) == loop.requests
        assert len(found.tpot_s) <= loop.requests
        assert min(found.ttft_s) >= 1e-3  # of a prompt of one token
        assert all(seconds >= 0.0019 for seconds in found.tpot_s)  # passes with a token of a prompt
        assert found == run()
