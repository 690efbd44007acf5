"""Both latencies of a measured row: simulated, and as aiconfigurator estimates them itself.

The rows are closed loops (`sim.closed_loop`). Those with lengths of InferenceMAX are run by its published protocol: ten
requests for each of the concurrency, all of it at once at the start, lengths uniform from 0.8 of the row's; on Blackwell SGLang
told to look for new requests every 10 decode steps, from a concurrency of 16 on every 30. How others were run nobody says: as
often, equal lengths, and the frameworks' defaults. A latency is the mean of all requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean

from pdmux_ray.bench.calibration.closed_loop import Fleet, Latencies, Loop, apart, together
from pdmux_ray.bench.calibration.engines import (
    EngineTimes,
    Served,
    engine,
    facts,
    kernels,
    pool_tokens,
    raw_together,
    served,
)
from pdmux_ray.bench.calibration.rows import Group, Pool, Row, UncostedError

ROUNDS = 10
INFERENCE_MAX = ((1024, 1024), (1024, 8192), (8192, 1024))
SHORTEST = 0.8
LOOK_EVERY, BUSY, BUSY_LOOK_EVERY = 10, 16, 30
HOPPER = ("h100_sxm", "h200_sxm")
BUDGET, LARGE_BUDGET = 8192, 16_384  # prompt tokens of a pass, by default of all three frameworks; larger GPUs: twice
RAW_TTFT, RAW_TPOT = 1.8, 1.08  # what aiconfigurator multiplies steps of engines that do one phase by


@dataclass(frozen=True, slots=True)
class Serving:
    """What a framework adds to the kernels' times. Seconds and factors."""

    mixes: bool  # a pass has prompts and decodes; else decodes wait
    reserved: float  # of an answer's KV, when a request is admitted
    memory: float  # of the GPU's that it uses (TensorRT-LLM: of what the weights leave)
    adds: bool  # what the host takes comes on top of the kernels' time; else the longer one counts
    layer_s: float  # of the host, of a layer of a pass with prompts: those are launched one by one
    moe_layer_s: float  # where the layer has experts
    passes: float  # times what the kernels of such a pass take
    steps: float  # times what a decode step takes
    moe_steps: float  # where layers have experts
    first_s: float  # of a first token, besides


@dataclass(frozen=True, slots=True)
class Estimate:
    ttft_s: float
    tpot_s: float


def simulated(row: Row, serving: Mapping[str, Serving]) -> Estimate:
    """Raises UncostedError."""
    if row.framework not in serving:
        raise UncostedError(f"how {row.framework} serves is not known")
    first_s, how = serving[row.framework].first_s, replace(serving[row.framework], first_s=0.0)
    found = _together(row, row.together, how) if row.together else _apart(row, how)
    return replace(found, ttft_s=found.ttft_s + first_s)


def raw(row: Row) -> Estimate:
    """Raises UncostedError."""
    if row.together:
        batch = -(-row.concurrency // row.together.dp)
        return Estimate(*raw_together(served(row, row.together), batch, row.prompt, row.output))
    prefill, decode = _pools(row)
    batch = -(-row.concurrency // (decode.workers * decode.group.dp))
    ttft_ms = engine(served(row, prefill.group)).handle.predict_prefill_latency(1, row.prompt, 0)
    tpot_ms = engine(served(row, decode.group)).handle.decode_step_latency(batch, row.prompt, row.output)
    return Estimate(RAW_TTFT * ttft_ms / 1e3, RAW_TPOT * tpot_ms / 1e3)


def _together(row: Row, group: Group, how: Serving) -> Estimate:
    what = served(row, group)
    return _run_together(what, how, _loop(row, how, -(-row.concurrency // group.dp), pool_tokens(what, how.memory)))


@cache
def _run_together(what: Served, how: Serving, loop: Loop) -> Estimate:
    """Rows that repeat others are not run again."""
    return _means(together(_times(what, how), loop))


def _means(found: Latencies) -> Estimate:
    if not found.tpot_s:
        raise UncostedError("answers of one token have no TPOT")
    return Estimate(fmean(found.ttft_s), fmean(found.tpot_s))


def _apart(row: Row, how: Serving) -> Estimate:
    prefill, decode = _pools(row)
    what = served(row, decode.group)
    ranks = decode.workers * decode.group.dp
    loop = _loop(row, how, row.concurrency, pool_tokens(what, how.memory) * ranks)
    fleet = Fleet(prefill.workers * prefill.group.dp, ranks)
    return _means(apart(_times(served(row, prefill.group), how), _times(what, how), loop, fleet))


def _pools(row: Row) -> tuple[Pool, Pool]:
    assert row.prefill is not None
    assert row.decode is not None
    return row.prefill, row.decode


def _loop(row: Row, how: Serving, concurrency: int, pool: float) -> Loop:
    hopper, requests = row.system in HOPPER, ROUNDS * concurrency
    budget = BUDGET if hopper else LARGE_BUDGET
    loop = Loop(row.prompt, row.output, concurrency, requests, budget, how.mixes, pool, how.reserved)
    if (row.prompt, row.output) not in INFERENCE_MAX:
        return loop
    if row.framework != "sglang" or hopper:
        return replace(loop, shortest=SHORTEST)
    return replace(loop, shortest=SHORTEST, look_every=BUSY_LOOK_EVERY if row.concurrency >= BUSY else LOOK_EVERY)


def _times(what: Served, how: Serving) -> EngineTimes:
    known = facts(what.path)
    layer_s, steps = (how.moe_layer_s, how.moe_steps) if known.moe else (how.layer_s, how.steps)
    return EngineTimes(kernels(what), known.layers * layer_s, how.adds, how.passes, steps)
