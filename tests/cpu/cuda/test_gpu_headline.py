"""The headline of `pdmux gpu-check`: how long its runs are, and what may be concluded from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(600)]


def lab(directory: Path) -> Any:
    from pdmux_ray.device.cuda.recording import RecordingStreams
    from pdmux_ray.gpu_check.lab import Lab
    from pdmux_ray.gpu_check.sizes import DRY

    return Lab(RecordingStreams(), DRY, directory, dry=True, deadline_s=0.0)


def targets(*good: Sequence[Sequence[bool]]) -> Any:
    """AUTO, then chunked settings: of each, which requests were good at 1, 2, 4 … requests a second."""
    from pdmux_ray.gpu_check.headline import Target
    from pdmux_ray.gpu_check.settings import Settings
    from pdmux_ray.metrics.goodput import RatePoint

    names = ["auto", *(f"chunked {index}" for index in range(1, len(good)))]
    return [
        Target(name, Settings(), [RatePoint(2.0**index, point) for index, point in enumerate(points)])
        for name, points in zip(names, good, strict=True)
    ]


ALL, NONE = (True,) * 30, (False,) * 30


SOME = (*(True,) * 24, *(False,) * 3) * 2  # 89 % are good, and as well 95 % might be


@pytest.mark.parametrize(
    ("good", "gain", "verdict"),
    [
        (([ALL, ALL, ALL], [ALL, NONE], [NONE]), 4 / 1.1, "ok"),  # chunked: 9 of 10 would be good at 1.1 a second
        (([ALL, ALL, ALL], [NONE], [NONE]), 4.0, "ok"),  # chunks that hold nowhere carry less than the lowest rate
        (([ALL, ALL, ALL, NONE], [ALL, ALL, ALL, NONE], [NONE]), 1.0, "FAILED"),
        (([NONE], [ALL, NONE], [NONE]), 0.0, "FAILED"),
        (([NONE], [NONE], [NONE]), 0.0, "not judged"),  # they may be as unequal as they like at lower rates
        (([ALL, ALL, ALL], [ALL, ALL, NONE], [NONE]), 4 / 2.2, "not judged"),  # AUTO may carry far more than 4
        (([ALL, ALL, ALL], [ALL, ALL, ALL], [NONE]), 1.0, "not judged"),  # both may
        (([ALL, ALL, ALL], [SOME], [NONE]), 4.0, "ok"),
        (([ALL, SOME, NONE], [SOME], [NONE]), None, "not judged"),
    ],
)
def test_auto_must_carry_twice_what_the_best_chunks_do(
    tmp_path: Path, good: Sequence[Sequence[Sequence[bool]]], gain: float | None, verdict: str
) -> None:
    from pdmux_ray.gpu_check.headline import compare

    shared = dataclasses.replace(lab(tmp_path), dry=False)
    row = list(compare(shared, "loogle", 1.0, targets(*good)))[-1]
    assert gain is None or row.value == pytest.approx(gain)
    assert row.verdict == verdict
    assert ("cannot tell" in row.note) == (verdict == "not judged")


def test_the_short_load_has_a_figure_and_no_limit(tmp_path: Path) -> None:
    from pdmux_ray.gpu_check.headline import compare

    shared = dataclasses.replace(lab(tmp_path), dry=False)
    assert list(compare(shared, "sharegpt", 1.0, targets([NONE], [ALL])))[-1].verdict == ""


def test_a_setting_that_there_was_no_time_for_is_neither_a_failure_nor_a_victory(tmp_path: Path) -> None:
    from pdmux_ray.gpu_check.headline import compare, headline

    shared = dataclasses.replace(lab(tmp_path), dry=False)
    assert list(compare(shared, "loogle", 1.0, targets([ALL], [])))[-1].verdict == "not judged"
    (row,) = headline(shared)  # its deadline is long past
    assert (row.value, row.verdict) == ("not run", "not judged")


def load_of(directory: Path, run_s: float = 9.0, **sizes: Any) -> Any:
    """The long load on a device that computes 10,000 prompt tokens a second and, at little cost, decodes."""
    from pdmux_ray.gpu_check.headline import Load
    from pdmux_ray.gpu_check.sizes import GPU
    from pdmux_ray.policy.fake_costs import FakeCosts
    from pdmux_ray.workload.shapes import LOOGLE

    shared = dataclasses.replace(lab(directory), dry=False, sizes=dataclasses.replace(GPU, **sizes))
    costs = FakeCosts(8, 48, fixed_s=0.0, weights_s=0.016, request_s=1e-5, context_s=1e-8, token_s=1e-4, pair_s=0.0)
    runner = SimpleNamespace(units=8, layers=48)
    return Load(shared, runner, costs, LOOGLE, run_s)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("run_s", "context", "comes_s"), [(9.0, 4096, 9.0), (5.0, 4096, 5.1 / 0.6), (20.0, 8192, 20.0), (65.0, 16_384, 65.0)]
)
def test_contexts_are_as_long_as_requests_come_for_much_longer_than_their_longest_objective(
    tmp_path: Path, run_s: float, context: int, comes_s: float
) -> None:
    load = load_of(tmp_path, run_s)
    assert load.context == context
    assert load.run_s == pytest.approx(comes_s, rel=0.01)
    assert 1.0 + 0.001 * context <= 0.61 * load.run_s


def test_every_run_has_enough_requests_for_a_verdict_and_nothing_carries_the_highest_rate(tmp_path: Path) -> None:
    from pdmux_ray.gpu_check.headline import ATTAINMENT, PATIENCE

    load = load_of(tmp_path)
    assert all(load.count(rate) >= 30 for rate in load.rates)
    assert load.rates[2] / load.rates[0] > 1.7 / 0.5  # more requests share more, so more of them could be carried
    assert load.rates[2] / load._most_rps(load.count(load.rates[2])) == pytest.approx(1.7, rel=0.02)
    assert 1.0 + PATIENCE / ATTAINMENT < 1.7
    assert load_of(tmp_path, least_requests=60).count(load.rates[0]) == 60


def test_a_rate_is_a_share_of_what_could_be_carried_of_just_as_many_requests(tmp_path: Path) -> None:
    from pdmux_ray.workload.outline import reusable_fraction
    from pdmux_ray.workload.scaling import Scaling
    from pdmux_ray.workload.shapes import LOOGLE
    from pdmux_ray.workload.source import TokenWorkload

    load = load_of(tmp_path)
    for share, rate in zip((0.5, 0.9, 1.7), load.rates, strict=True):
        outlines = TokenWorkload(LOOGLE, Scaling(max_context=4096, min_output_tokens=2), (3, 32_000)).outlines(
            load.count(rate), 0
        )
        prompt_tokens = sum(outline.prompt_tokens for outline in outlines) / len(outlines)
        new_tokens = (1 - reusable_fraction(outlines)) * prompt_tokens
        assert rate == pytest.approx(share / (1e-4 * new_tokens), rel=0.15)  # decodes take some


def test_a_run_may_miss_as_many_as_the_attainment_leaves() -> None:
    from pdmux_ray.gpu_check.headline import most_misses_of

    assert [most_misses_of(count) for count in (9, 10, 29, 30, 40)] == [0, 1, 2, 3, 4]


def test_the_tuned_chunk_stands_for_sizes_near_it(tmp_path: Path) -> None:
    from pdmux_ray.gpu_check.headline import make_targets
    from pdmux_ray.gpu_check.settings import Settings
    from pdmux_ray.gpu_check.sizes import GPU

    shared = dataclasses.replace(lab(tmp_path), sizes=GPU)
    names = [[target.name for target in make_targets(shared, Settings(), tuned)] for tuned in (448, 768)]
    assert names[0] == ["auto", "chunked 448 (tuned)", "chunked 1024", "chunked 2048"]
    assert names[1] == ["auto", "chunked 768 (tuned)", "chunked 512", "chunked 1024", "chunked 2048"]
