"""Records of a timeline of four units."""

from __future__ import annotations

from pdmux_ray.engine.timeline import PrefillBlock, Step

UNITS = 4


def step(begin_s: float, end_s: float, *, decodes: int = 2, decode_units: int = 1, waiting: int = 0) -> Step:
    """Of a split; predicted."""
    return Step("step", 0, begin_s, end_s, "lanes_both", "split", "fits", 3, decode_units, decodes, 0, waiting, 0.019, 0.0221)


def one_pass(begin_s: float, end_s: float, decodes: int, prefill_tokens: int) -> Step:
    return Step("step", 0, begin_s, end_s, "chunk_mixed", "chunked", None, UNITS, UNITS, decodes, prefill_tokens, 0, None, None)


def block(begin_s: float, end_s: float, units: int = 3) -> PrefillBlock:
    return PrefillBlock("block", 0, begin_s, end_s, "split", "slack", units, 1, 7, 5, 12, 700, None, None)
