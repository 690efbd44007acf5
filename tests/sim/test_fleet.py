from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmux_ray.costs.device import Slower
from pdmux_ray.costs.gpu import H200, LLAMA_8B, device_model
from pdmux_ray.engine.timeline import Step
from pdmux_ray.metrics.lifeline import Ending, Lifeline
from pdmux_ray.policy.decisions import RouteReason
from pdmux_ray.policy.views import Piece
from pdmux_ray.sim.fleet import LINE_S, simulate
from pdmux_ray.sim.transfers import LATENCY_S
from tests.unit.sim.fleets import COSTS, LAYERS, LINK, UNITS, config, device, requests, stream

lengths = st.tuples(st.integers(1, 200), st.integers(1, 12))
fleets = st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 1)).filter(lambda counts: counts[1] + counts[2] > 0)


def times(lifelines: list[Lifeline]) -> list[list[float]]:
    return [list(lifeline.token_s) for lifeline in lifelines]


@settings(max_examples=10, deadline=None)
@given(
    st.lists(lengths, min_size=1, max_size=12),
    fleets,
    st.sampled_from(["predict", "threshold", "local", "remote"]),
    st.sampled_from(["auto", "time_shared", "chunked", "prefill_first"]),
    st.sampled_from([0.0, 0.003, 0.05]),
)
def test_every_request_ends_exactly_once_with_its_tokens_and_no_page_is_missing(
    asked: list[tuple[int, int]], roles: tuple[int, int, int], policy: str, mode: str, gap_s: float
) -> None:
    run = simulate(config(*roles, policy, mode=mode), device(), stream(asked, gap_s), context_length=256)
    assert [lifeline.ending for lifeline in run.lifelines] == [Ending.COMPLETE] * len(asked)
    assert [len(lifeline.token_s) for lifeline in run.lifelines] == [output for _, output in asked]
    assert all(before <= after for lifeline in run.lifelines for before, after in pairwise(lifeline.token_s))
    finished = sum(sum(engine.counters.finished.values()) for engine in run.engines.values())
    assert finished == len(asked)


def test_the_same_seed_gives_the_same_lifelines_and_another_one_others() -> None:
    asked = stream([(60, 8), (10, 8), (150, 3), (20, 12)] * 4, 0.02)
    first, again, other = (simulate(config(), device(), asked, seed=seed) for seed in (1, 1, 2))
    assert times(list(first.lifelines)) == times(list(again.lifelines))
    assert times(list(first.lifelines)) != times(list(other.lifelines))
    assert first.choices == again.choices


def test_in_an_idle_fleet_a_first_token_takes_its_way_and_its_prefill() -> None:
    (lifeline,) = simulate(config(0, 1), device(), requests((0.0, 100, 1)), spread=0.0).lifelines
    prefill_s = COSTS.prefill((Piece(100, 0),), LAYERS, UNITS, 0, last=True).predicted_s
    assert lifeline.ttft_s == pytest.approx(2 * LINE_S + prefill_s)


def test_in_an_idle_fleet_a_fetched_one_takes_the_prefill_elsewhere_the_transfer_and_a_decode_step() -> None:
    model = device()
    run = simulate(config(1, 0, 1, "remote"), model, requests((0.0, 101, 1)), spread=0.0)
    prefill_s = COSTS.prefill((Piece(100, 0),), LAYERS, UNITS, 0, last=True).predicted_s
    transfer_s = 100 * model.kv_bytes_per_token / LINK
    decode_s = COSTS.decode(1, 101, UNITS, 0).predicted_s
    parts_s = 2 * LINE_S + 2 * LATENCY_S + prefill_s + transfer_s + decode_s
    assert run.choices[0].reason is RouteReason.ALWAYS
    assert run.lifelines[0].ttft_s == pytest.approx(parts_s)
    assert run.engines["decode-1"].counters.kv_used_tokens == 100


def test_a_push_hides_behind_the_prefill_but_for_its_last_block() -> None:
    """So long a prompt is computed in several blocks."""
    model = device()
    run = simulate(config(1, 0, 1, "remote"), model, requests((0.0, 1001, 1)), spread=0.0)
    prefill_s = COSTS.prefill((Piece(1000, 0),), LAYERS, UNITS, 0, last=True).predicted_s
    transfer_s = 1000 * model.kv_bytes_per_token / LINK
    ttft_s = run.lifelines[0].ttft_s
    assert ttft_s is not None
    assert max(prefill_s, transfer_s) < ttft_s < 0.8 * (prefill_s + transfer_s)


def test_arrivals_amid_a_step_wait_for_its_end() -> None:
    run = simulate(config(0, 1, mode="prefill_first"), device(), requests((0.0, 100, 1), (0.002, 10, 1)), spread=0.0)
    first, second = run.lifelines
    step_s = COSTS.mixed(0, 0, (Piece(10, 0),), UNITS).predicted_s
    assert second.token_s[0] - first.token_s[0] == pytest.approx(step_s)


def test_a_request_that_is_refused_has_failed_and_is_no_further_trouble() -> None:
    asked = requests(*((0.0, 20, 4) for _ in range(8)))
    run = simulate(config(0, 1, max_waiting=3), device(), asked)
    endings = [lifeline.ending for lifeline in run.lifelines]
    assert endings.count(Ending.COMPLETE) == 3
    assert endings.count(Ending.ERROR) == 5
    assert "waiting" in (run.lifelines[-1].error or "")


def test_a_request_past_its_deadline_fails() -> None:
    app = config(0, 1)
    gateway = app.gateway.model_copy(update={"request_timeout_s": 0.3})
    run = simulate(app.model_copy(update={"gateway": gateway}), device(), requests((0.0, 10, 200)))
    assert run.lifelines[0].ending is Ending.ERROR
    assert 0 < len(run.lifelines[0].token_s) < 200


def test_what_a_gateway_has_sent_before_makes_it_choose_the_other_instance() -> None:
    run = simulate(config(0, 2), device(), requests((0.0, 200, 1), (0.0001, 200, 1), (0.0002, 10, 1)))
    first, second, _ = (choice.instance_id for choice in run.choices)
    assert first != second


def test_predictions_of_an_idle_fleet_are_what_comes() -> None:
    run = simulate(config(1, 1), device(), stream([(100, 2), (30, 2), (200, 2)], 0.5), spread=0.0)
    for choice, lifeline in zip(run.choices, run.lifelines, strict=True):
        assert lifeline.ttft_s is not None
        assert choice.predicted_ttft_s is not None
        assert math.isclose(choice.predicted_ttft_s, lifeline.ttft_s, rel_tol=0.25)


@pytest.mark.parametrize(("learning", "off"), [(False, 1.5), (True, 1.0)])
def test_instances_learn_how_long_steps_really_take_only_when_they_are_to(learning: bool, off: float) -> None:
    slow = replace(device_model(H200, LLAMA_8B), slower=Slower(decode=1.5))
    run = simulate(config(0, 1, page_size=16), slow, requests((0.0, 10, 80)), spread=0.0, learning=learning)
    *_, last = (record for record in run.engines["mux-0"].timeline.since(0) if isinstance(record, Step))
    assert last.predicted_s is not None
    assert (last.end_s - last.begin_s) / last.predicted_s == pytest.approx(off, rel=0.01)


def test_a_gateway_predicts_by_the_configured_bandwidth_until_so_much_was_moved_that_it_is_known() -> None:
    """64 MiB: one such prompt has more. The link is 10,000 times what the configuration says."""
    model = device()
    model = replace(model, layout=replace(model.layout, head_dim=8192), link_bytes_per_s=1e4 * LINK)
    run = simulate(config(1, 0, 1, "predict"), model, stream([(600, 1)] * 2, 5.0), spread=0.0)
    (first, second), came_s = run.choices, run.lifelines[1].ttft_s
    assert first.predicted_ttft_s == pytest.approx(599 * model.kv_bytes_per_token / LINK, rel=0.01)
    assert second.predicted_ttft_s == pytest.approx(came_s, rel=0.25)


def test_who_watches_hears_how_many_requests_have_ended() -> None:
    heard: list[int] = []
    simulate(config(0, 1), device(), stream([(20, 2)] * 5, 0.5), watch=heard.append)
    assert heard == sorted(heard)
    assert heard[0] == 0
    assert heard[-1] in (4, 5)
