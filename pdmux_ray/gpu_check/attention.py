"""The attention of prefills by each of `engine.cuda.prefill_attention` that is installed: whether it is right, and how fast.

On pages of 256 tokens, which all of them take, in the shape of Llama-3.1-8B. What is not installed, or does not run, is said
and costs no check: the default needs neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import torch

from pdmux_ray.device.cuda.prefill_backends import KEY, NAMES, MakeAttention, Needs, attention_by
from pdmux_ray.device.cuda.probe import times_s
from pdmux_ray.device.cuda.streams import Stream
from pdmux_ray.errors import ConfigError
from pdmux_ray.gpu_check.lab import Lab
from pdmux_ray.gpu_check.operations import RELATIVE_ERROR, Step, attention_error, make
from pdmux_ray.gpu_check.report import Row, Verdict
from pdmux_ray.types import Split

PAGE_SIZE = 256
_PLANS = 4  # steps that are compared or timed at once


def attention(lab: Lab) -> Iterator[Row]:
    """Errors, then times on all SMs and on the prefill lane of the split in the middle, and which is the fastest there."""
    found_s: dict[str, float] = {}
    for name in NAMES:
        try:
            made = attention_by(name, Needs(lab.streams.device, lab.dtype, PAGE_SIZE, lab.sizes.middle.head_dim, _PLANS))
            for step in _steps(lab):
                yield RELATIVE_ERROR.row(f"{name}: {step.what}", attention_error(lab, step, lab.streams.units, attention=made))
            for row, seconds in _times(lab, name, made):
                found_s[name] = seconds
                yield row
        except ConfigError as error:
            yield Row(name, "not there", note=str(error))
        except Exception as error:
            if name == NAMES[0]:
                raise
            yield Row(name, "does not run", verdict=Verdict.NOT_JUDGED, note=f"{type(error).__name__}: {error}")
    yield Row(f"fastest of these, for {KEY}", min(found_s, key=lambda name: found_s[name]))


def _steps(lab: Lab) -> list[Step]:
    """Several sequences, with cached prefixes, with a window, and beside decodes."""
    longest, dim = lab.sizes.kernel_context, lab.sizes.middle.head_dim
    queries, contexts = (longest // 3, 3, 9), (longest, 20, 9)
    return [
        Step("cached prefixes", 8, 2, dim, queries, contexts, page_size=PAGE_SIZE),
        Step("cached prefixes, window", 8, 2, dim, queries, contexts, longest // 4, page_size=PAGE_SIZE),
        Step("beside decodes", 8, 2, dim, (1, 1, *queries), (longest, 17, *contexts), decodes=2, page_size=PAGE_SIZE),
    ]


def _times(lab: Lab, name: str, made: MakeAttention) -> Iterator[tuple[Row, float]]:
    units, streams = lab.streams.units, lab.streams
    lanes: list[tuple[Split, str]] = [(Split(units, 0), "every SM")]
    if lab.splits:
        split = lab.splits[len(lab.splits) // 2]
        lanes.insert(0, (split, f"{split.prefill_units} SMs"))
    tokens = lab.sizes.prefill_tokens
    for split, where in lanes:
        seconds = _seconds(lab, made, streams.prefill(split))
        flop = 2.0 * lab.sizes.middle.heads * lab.sizes.middle.head_dim * tokens * (tokens + 1)
        note = f"{flop / seconds / 1e12:.0f} TFLOP/s"
        yield Row(f"{name}: a layer of {tokens} tokens, {where}", 1e3 * seconds, "ms", note=note), seconds


def _seconds(lab: Lab, made: MakeAttention, stream: Stream) -> float:
    """Of the device, for one layer's attention of one prompt. Its queries are rotated already, so to say."""
    shape, tokens = lab.sizes.middle, lab.sizes.prefill_tokens
    step = Step("", shape.heads, shape.kv_heads, shape.head_dim, (tokens,), (tokens,), page_size=PAGE_SIZE)
    pool, qkv, batch, spec = make(step, lab.streams.device, lab.dtype, seed=0)
    keys, values = pool[0]
    attend = made(stream.units, 1)
    out = torch.empty(tokens, shape.heads * shape.head_dim, dtype=lab.dtype, device=lab.streams.device)
    return median(times_s(lab.streams, stream, lambda: attend(qkv, keys, values, batch, spec, out), lab.sizes.timings))
