"""Rows simulated with the database of aiconfigurator. Needs it installed, and seconds to read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pdmux_ray.bench.calibration import estimates
from pdmux_ray.bench.calibration.engines import Added, kv, link_bytes_per_s, served
from pdmux_ray.bench.calibration.estimates import Estimate, raw, simulated
from pdmux_ray.bench.calibration.rows import Group, Pool, Row, UncostedError
from pdmux_ray.bench.calibration.serving import NEUTRAL

pytestmark = pytest.mark.cpu
GROUP = Group(4, 1, 1, 1)
TOGETHER = Row(
    name="a",
    model="meta-llama/Llama-3.1-70B",
    system="h200_sxm",
    framework="vllm",
    precision="fp8",
    gemm="fp8",
    moe="",
    prompt=2048,
    output=64,
    concurrency=2,
    together=GROUP,
    prefill=None,
    decode=None,
    ttft_s=0.1,
    tpot_s=0.01,
)
APART = replace(TOGETHER, together=None, prefill=Pool(GROUP, 2), decode=Pool(GROUP, 1))


@pytest.mark.parametrize(
    "change",
    [
        {"system": "h999"},
        {"model": "nobody/knows-1b"},
        {"model": "mistralai/Mixtral-8x7B-v0.1"},
        {"framework": "own"},
        {"together": Group(7, 1, 1, 1)},
        {"together": Group(1024, 9, 3, 5)},
        {"gemm": "fp3"},
        {"prompt": 2**20, "output": 1},
    ],
    ids=str,
)
def test_what_cannot_be_simulated_has_a_reason_that_is_counted_or_a_time(change: dict[str, object]) -> None:
    """A precision that nobody knows is what the model's config.json says."""
    row = replace(TOGETHER, **change)  # type: ignore[arg-type]
    estimates_of: tuple[Callable[[Row], Estimate], ...] = (lambda row: simulated(row, NEUTRAL), raw)
    for estimate in estimates_of:
        try:
            found = estimate(row)
        except UncostedError:
            continue
        assert found.ttft_s > 0


def test_apart_a_first_token_comes_after_the_prompt_s_kv_over_the_gpus_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 layers of 8 heads of 128, keys and values: 163,840 numbers a token, a fourth of it on each GPU."""
    pool = kv(served(TOGETHER, GROUP), 0.9)
    assert link_bytes_per_s("h200_sxm") == 50e9
    assert pool.token_bytes in (163_840 / 4, 2 * 163_840 / 4)
    with_link = simulated(APART, NEUTRAL)
    monkeypatch.setattr(estimates, "link_bytes_per_s", lambda system: 1e18)
    without = simulated(APART, NEUTRAL)
    assert with_link.ttft_s - without.ttft_s == pytest.approx(2048 * pool.token_bytes / 50e9, rel=0.1)


def test_apart_a_first_token_waits_for_room_where_decodes_are() -> None:
    roomy = replace(APART, concurrency=8)
    narrow = {**NEUTRAL, "vllm": replace(NEUTRAL["vllm"], dense=Added(memory=0.155))}
    assert kv(served(TOGETHER, GROUP), 0.155).tokens < 3 * 2048
    assert simulated(roomy, narrow).ttft_s > simulated(roomy, NEUTRAL).ttft_s + 0.1
