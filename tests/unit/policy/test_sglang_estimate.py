"""The published estimate of what the rule's split is worth, recomputed: Qwen3-8B in bfloat16 on an H100 that decodes 32
requests of 2,048 tokens when a prompt of 8,192 arrives. Decode is bound by memory traffic, prefill by arithmetic.
"""

from __future__ import annotations

import pytest

from pdmux_ray.policy.sglang import GRAINS, PublishedRule, PublishedTable
from pdmux_ray.types import Split

UNITS, DECODES, CONTEXT, PROMPT = 132, 32, 2048, 8192
BYTES_PER_S = 0.85 * 3.35e12
FLOPS = 0.5 * 989e12
LAYERS, HIDDEN, KV_WIDTH, FFN, VOCABULARY = 36, 4096, 1024, 12288, 151936
WEIGHTS = LAYERS * HIDDEN * (2 * HIDDEN + 2 * KV_WIDTH + 3 * FFN) + HIDDEN * VOCABULARY  # of the linear layers
KV_BYTES = LAYERS * 2 * KV_WIDTH * 2  # of a token

# By the units at which memory is saturated: (ITL beside the prefill in ms, tokens a request gets meanwhile).
MULTIPLEXED = {44: (9, 55), 66: (11, 43), 88: (15, 33)}
# By the chunk: (ITL in ms, prefill in ms, steps).
CHUNKED = {2048: (74, 295, 4), 512: (19, 306, 16)}


def decode_s(units: int, saturated_at: int) -> float:
    return (2 * WEIGHTS + DECODES * CONTEXT * KV_BYTES) / (BYTES_PER_S * min(1.0, units / saturated_at))


def prefill_flops(tokens: int, start: int = 0) -> float:
    """Of tokens [start, start + tokens) of a prompt, with causal attention."""
    return 2 * WEIGHTS * tokens + 4 * LAYERS * HIDDEN * (tokens * start + tokens**2 / 2)


def ms(seconds: float) -> int:
    return round(seconds * 1e3)


def split() -> Split:
    return PublishedRule.of(PublishedTable(), UNITS, GRAINS[9]).split(DECODES)


def test_the_rule_gives_prefill_80_units_for_32_decodes() -> None:
    assert split() == Split(80, 52)


@pytest.mark.parametrize(("saturated_at", "printed"), MULTIPLEXED.items())
def test_multiplexed_the_itl_stays_near_nine_ms_and_the_prefill_takes_480(saturated_at: int, printed: tuple[int, int]) -> None:
    prefill_s = prefill_flops(PROMPT) / (FLOPS * split().prefill_units / UNITS)
    itl_s = decode_s(split().decode_units, saturated_at)
    assert ms(prefill_s) == 480
    assert (ms(itl_s), round(prefill_s / itl_s)) == printed


def test_prefill_first_one_step_takes_300_ms_instead_of_9() -> None:
    solo_s, prefill_s = decode_s(UNITS, 66), prefill_flops(PROMPT) / FLOPS
    assert (ms(solo_s), ms(prefill_s), ms(prefill_s + solo_s)) == (9, 291, 299)


@pytest.mark.parametrize(("chunk", "printed"), CHUNKED.items())
def test_chunked_every_step_of_the_prefill_is_slower(chunk: int, printed: tuple[int, int, int]) -> None:
    mixed = [(prefill_flops(chunk, start) + 2 * WEIGHTS * DECODES) / FLOPS for start in range(0, PROMPT, chunk)]
    steps_s = [max(arithmetic_s, decode_s(UNITS, 66)) for arithmetic_s in mixed]
    assert (ms(sum(steps_s) / len(steps_s)), ms(sum(steps_s)), len(steps_s)) == printed
