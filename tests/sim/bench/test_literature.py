"""The comparisons with published figures: their arithmetic, fleets and routers. docs/literature.md has what they find."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmux_ray.bench.literature import distserve, estimates, mooncake, multiplexing, sensitivity, transfer
from pdmux_ray.bench.literature.__main__ import NAMES, chosen, parser
from pdmux_ray.bench.literature.fleets import Fleet, Load, StepTimes, config, limit, offered
from pdmux_ray.bench.literature.rows import Comparison, Row
from pdmux_ray.costs.gpu import A100, H200, LLAMA_8B, LLAMA_70B, device_model
from pdmux_ray.errors import ConfigError
from pdmux_ray.metrics.goodput import Slo
from pdmux_ray.policy.views import Piece
from pdmux_ray.serve.router import Router
from pdmux_ray.sim.fleet import RouterOf, simulate
from pdmux_ray.types import Mode, Role
from pdmux_ray.workload.arrivals import plan
from pdmux_ray.workload.requests import Ask

ROOFLINE = StepTimes("roofline")


def quiet(text: str) -> None:
    """Nobody watches."""


def test_a_ratio_is_ours_over_the_published_figure() -> None:
    assert Row("x", 4.0, 6.0, "ms").ratio == 1.5
    assert Row("x", None, 6.0, "ms").ratio is None
    assert Row("x", 4.0, None, "ms").ratio is None


def test_a_comparison_prints_a_row_for_each_figure_and_what_is_assumed() -> None:
    rows = [Row("x", 4.0, 6.0, "ms"), Row("y", None, 2.0, "s", ours_as="at least 2")]
    lines = Comparison("Title", "somebody.", rows, ["This.", "That."], "because.").lines()
    assert [line for line in lines if line.startswith("| ")][2:] == [
        "| x | 4.00 | 6.00 | ms | 1.50 |",
        "| y | – | at least 2 | s | – |",
    ]
    assert "Assumed: This. That." in lines
    assert "Why they differ: because." in lines


def test_the_kv_of_opt_175b_over_eight_links_is_that_of_its_heads() -> None:
    kv, whole, *_ = transfer.compare(ROOFLINE).rows
    assert kv.ours == 96 * 2 * 12_288 * 2 / 1e6
    assert whole.ours == pytest.approx(2048 * 96 * 2 * 12_288 * 2 / (8 * 64e9) * 1e3, rel=1e-3)


def test_with_the_handbook_s_constants_our_formula_gives_its_table() -> None:
    costs = estimates.handbook_costs(66)
    assert estimates.alone(costs) == pytest.approx(9e-3, rel=0.05)
    assert estimates.first(costs).prefill_s == pytest.approx(0.291, rel=0.005)
    assert estimates.split(costs).prefill_s == pytest.approx(0.480, rel=0.005)
    guesses = [estimates.split(estimates.handbook_costs(sms)).itl_s for sms in estimates.FULL_FROM]
    assert guesses == pytest.approx([9e-3, 11e-3, 15e-3], rel=0.05)


def test_smaller_chunks_shorten_the_gaps_and_lengthen_the_prefill() -> None:
    large, small = (estimates.chunked(estimates.handbook_costs(66), chunk) for chunk in estimates.CHUNKS)
    assert small.itl_s < large.itl_s
    assert small.prefill_s > large.prefill_s


@given(st.integers(1, 2048), st.integers(1, 90), st.integers(0, 50_000))
def test_measured_step_times_are_those_that_were_published(prompt: int, batch: int, context: int) -> None:
    device = distserve.DISTSERVE.device()
    (step, token, square), (weights, each, row) = distserve.DISTSERVE.prefill, distserve.DISTSERVE.decode
    prefill = device.costs.mixed(0, 0, (Piece(prompt, 0),), device.units).predicted_s * 1e3
    decode = device.costs.decode(batch, context, device.units, 0).predicted_s * 1e3
    assert prefill == pytest.approx(step + token * prompt + square * prompt**2, rel=0.01)
    assert decode == pytest.approx(weights + each * context + row * batch, rel=1e-6)


def test_distserve_s_fleets_have_as_many_gpus_as_they_say() -> None:
    device = distserve.VLLM.device()
    devices = distserve.Devices(device, device)
    assert devices.fleet(0, 0).gpus == 1
    assert devices.fleet(2, 1).gpus == len(devices.fleet(2, 1).config.roles) == 3


def test_the_systems_of_multiplexing_share_all_their_gpus() -> None:
    server = multiplexing.server_70b(ROOFLINE)
    whole, chunks, halves = server.multiplexed(), server.chunked(512), server.halves()
    assert [fleet.gpus for fleet in (whole, chunks, halves)] == [8, 8, 8]
    assert (whole.config.engine.mode, chunks.config.engine.mode) == (Mode.SPLIT, Mode.CHUNKED)
    assert halves.config.roles == (Role.PREFILL, Role.DECODE)
    assert halves.device.layout.pages < whole.device.layout.pages / 2  # each half has all weights


def first_tokens(fleet: Fleet) -> list[int]:
    """Of a prompt that comes first and three short ones right behind it: in which order their first tokens came."""
    behind = asks(3, 300, 4)
    run = simulate(fleet.config, fleet.device, plan([Ask(tuple(range(60_000)), 4), *behind], [0.0, 0.1, 0.2, 0.3]), seed=1)
    first_s = {number: life.sent_s + life.ttft_s for number, life in enumerate(run.lifelines) if life.ttft_s is not None}
    return sorted(first_s, key=lambda number: first_s[number])


def test_multiplexed_in_order_of_arrival_nobody_overtakes_a_long_prompt_as_with_its_rivals() -> None:
    server = multiplexing.server_70b(ROOFLINE)
    assert first_tokens(server.multiplexed())[-1] == 0
    assert first_tokens(server.multiplexed_by_arrival()) == [0, 1, 2, 3]
    assert first_tokens(server.chunked(512)) == first_tokens(server.halves()) == [0, 1, 2, 3]


def test_of_chunks_that_keep_the_objective_the_largest_and_the_quickest_are_told() -> None:
    largest, by_due, by_arrival = multiplexing.best_chunk("w", [(256, 4.0), (512, 3.0)], {"": 1.5, ", so": 6.0})
    assert (largest.ours, by_due.ours, by_arrival.ours) == (512, 2.0, 0.5)
    largest, ratio = multiplexing.best_chunk("w", [], {"": 1.5})
    assert (largest.cells()[2], ratio.ours) == ("none", None)


def test_each_assumption_of_a_part_of_a_gpu_is_halved_and_doubled_alone() -> None:
    usual, *changed = sensitivity.cases(ROOFLINE)
    assert usual.steps == ROOFLINE
    for case in changed:
        before, after = asdict(ROOFLINE.assume), asdict(case.steps.assume)
        (name,) = (name for name in before if before[name] != after[name])
        factors = [(values[name] - 1 if name == "guard" else values[name]) for values in (before, after)]
        assert factors[1] / factors[0] == pytest.approx(0.5) or factors[1] / factors[0] == pytest.approx(2.0)
        assert case.name.startswith(name)
    assert len({case.name for case in changed}) == len(changed) == 2 * len(sensitivity.VARIED)


def test_what_is_assumed_of_a_part_of_a_gpu_changes_no_step_of_a_whole_one() -> None:
    def steps_s(case: sensitivity.Case, beside: int) -> tuple[float, float, float]:
        device, pieces = case.steps.device(A100, LLAMA_70B, tp=8), (Piece(512, 1024),)
        costs, units = device.costs, device.units - beside
        return (
            costs.decode(32, 65_536, units, beside).predicted_s,
            costs.prefill(pieces, 80, units, beside, last=True).predicted_s,
            costs.mixed(32, 65_536, pieces, device.units).predicted_s,
        )

    usual, *changed = sensitivity.cases(ROOFLINE)
    assert {steps_s(case, 0) for case in changed} == {steps_s(usual, 0)}
    overlap = sensitivity.Case("overlap", replace(ROOFLINE, assume=replace(ROOFLINE.assume, overlap=0.2)))
    assert steps_s(overlap, 54) == steps_s(usual, 54)
    moved = [steps_s(case, 54) != steps_s(usual, 54) for case in changed if not case.name.startswith("guard")]
    assert all(moved)


def test_the_lowest_and_the_highest_factor_are_told_of_each_rival() -> None:
    said = sensitivity.span([replace(TINY, name="a"), replace(TINY, name="b")], [[2.0, None], [3.0, None]])
    assert said == "2.00 to 3.00 over a and – over b"


TINY = Fleet("tiny", config({"max_batch": 4}), device_model(H200, LLAMA_8B), 1)


def asks(count: int, prompt: int, output: int) -> list[Ask]:
    return [Ask(tuple(range(number, number + prompt)), output) for number in range(count)]


def test_a_limit_lies_between_a_rate_that_holds_and_one_that_does_not() -> None:
    load, slo = Load(asks(30, 2_000, 4), (1.0, 64.0)), Slo(ttft_s=0.2)
    found = limit(TINY, load, [slo], quiet)
    held, lost = (
        [slo.verdict(life).value for life in offered(TINY, load, rate)].count("good")
        for rate in (found.rps * 0.9, found.rps * 1.3)
    )
    assert 1 < found.rps < 64
    assert held >= 27 > lost


def test_two_objectives_are_tested_apart_and_the_lower_limit_counts() -> None:
    load = Load(asks(20, 2_000, 4), (1.0, 64.0))
    tight, loose = Slo(ttft_s=0.1), Slo(ttft_s=5.0)
    assert limit(TINY, load, [loose, tight], quiet).rps == limit(TINY, load, [tight], quiet).rps


def mooncake_choices(router: RouterOf) -> list[str]:
    """Of one prompt that comes six times, twenty seconds apart, to two nodes that prefill: who prefilled it."""
    app = config(
        {"mode": "prefill_first", "page_size": mooncake.BLOCK},
        topology={"prefill": 2, "decode": 1},
        gateway={"routing": {"policy": "remote"}},
    )
    device = mooncake.device(ROOFLINE)
    same = [Ask(tuple(range(6_000 + 1)), 1)] * 6
    planned = plan(same, [20.0 * number for number in range(6)])
    run = simulate(app, device, planned, context_length=131_072, router=router)
    return [choice.prefill[0] for choice in run.choices if choice.prefill]


def test_a_router_that_knows_caches_sends_a_prompt_to_where_it_was() -> None:
    assert len(set(mooncake_choices(Router))) == 1


def test_routers_that_do_not_know_caches_spread_equal_prompts() -> None:
    assert len(set(mooncake_choices(mooncake.RandomRouter))) == 2
    assert len(set(mooncake_choices(mooncake.by_load))) == 2


def test_the_command_refuses_names_it_does_not_know_and_a_replay_without_a_trace() -> None:
    with pytest.raises(ConfigError, match="no comparison 'moon'"):
        chosen(parser().parse_args(["moon"]), quiet)
    with pytest.raises(ConfigError, match="--trace"):
        chosen(parser().parse_args([]), quiet)
    assert len(chosen(parser().parse_args(["--trace", str(Path("t"))]), quiet)) == len(NAMES)
