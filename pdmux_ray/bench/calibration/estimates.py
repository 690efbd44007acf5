"""Both latencies of a measured row: simulated, and as aiconfigurator estimates them itself.

The rows are closed loops (`closed_loop.py`). Those with lengths of InferenceMAX are run by its published protocol: ten
requests for each of the concurrency, all of it at once at the start, lengths uniform from 0.8 of the row's; on Blackwell SGLang
told to look for new requests every 10 decode steps, from a concurrency of 16 on every 30. How others were run nobody says: as
often, and by the frameworks' defaults; with lengths as much apart, around those that are told, because requests of equal ones
that begin at once stay in step for ever. A latency is the mean of all requests.

Where prefills and decodes are apart, a prompt's KV goes from the GPUs that computed it to those that decode, each over its link
to another node's, none of it before all is computed: the GPUs with more of it each are those that decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean

from pdmux_ray.bench.calibration.closed_loop import Fleet, Latencies, Loop, apart, together
from pdmux_ray.bench.calibration.engines import (
    NOTHING,
    Added,
    EngineTimes,
    Served,
    facts,
    kernels,
    kv,
    link_bytes_per_s,
    raw_apart,
    raw_together,
    served,
)
from pdmux_ray.bench.calibration.rows import Group, Pool, Row, UncostedError

ROUNDS = 10
INFERENCE_MAX = ((1024, 1024), (1024, 8192), (8192, 1024))
SHORTEST = 0.8
SPREAD = 0.1  # of lengths, where nobody says what they were: as those
LOOK_EVERY, BUSY, BUSY_LOOK_EVERY = 10, 16, 30
HOPPER = ("h100_sxm", "h200_sxm")
BUDGET, LARGE_BUDGET = 8192, 16_384  # prompt tokens of a pass, by default of all three frameworks; larger GPUs: twice


@dataclass(frozen=True, slots=True)
class Serving:
    """How a framework serves, by its defaults, and what it adds to the kernels' times of models without and with experts."""

    mixes: bool  # a pass has prompts and decodes; else decodes wait
    dense: Added = NOTHING
    experts: Added = NOTHING

    def added(self, experts: bool) -> Added:
        return self.experts if experts else self.dense

    def adding(self, experts: bool, added: Added) -> Serving:
        return replace(self, experts=added) if experts else replace(self, dense=added)


@dataclass(frozen=True, slots=True)
class Estimate:
    ttft_s: float
    tpot_s: float


def simulated(row: Row, serving: Mapping[str, Serving]) -> Estimate:
    """Raises UncostedError."""
    if row.framework not in serving:
        raise UncostedError(f"how {row.framework} serves is not known")
    how = serving[row.framework]
    added = how.added(has_experts(row))
    found = _together(row, row.together, how, added) if row.together else _apart(row, how, added)
    return replace(found, ttft_s=found.ttft_s + added.first_s)


def raw(row: Row) -> Estimate:
    """Raises UncostedError."""
    if row.together:
        batch = -(-row.concurrency // row.together.dp)
        return Estimate(*raw_together(served(row, row.together), batch, row.prompt, row.output))
    prefill, decode = _pools(row)
    batch = -(-row.concurrency // (decode.workers * decode.group.dp))
    return Estimate(*raw_apart(served(row, prefill.group), served(row, decode.group), batch, row.prompt, row.output))


def has_experts(row: Row) -> bool:
    """Raises UncostedError."""
    return facts(served(row, row.together or _pools(row)[1].group).path).moe


def _together(row: Row, group: Group, how: Serving, added: Added) -> Estimate:
    what = served(row, group)
    loop = _loop(row, how, added, -(-row.concurrency // group.dp), kv(what, added.memory).tokens)
    return _run_together(what, replace(added, first_s=0.0), loop)


@cache
def _run_together(what: Served, added: Added, loop: Loop) -> Estimate:
    """Rows that repeat others are not run again."""
    return _means(together(_times(what, added), loop))


def _means(found: Latencies) -> Estimate:
    if not found.tpot_s:
        raise UncostedError("answers of one token have no TPOT")
    return Estimate(fmean(found.ttft_s), fmean(found.tpot_s))


def _apart(row: Row, how: Serving, added: Added) -> Estimate:
    prefill, decode = _pools(row)
    sender, receiver = served(row, prefill.group), served(row, decode.group)
    pool, ranks = kv(receiver, added.memory), decode.workers * decode.group.dp
    token_bytes = max(kv(sender, added.memory).token_bytes, pool.token_bytes)
    fleet = Fleet(prefill.workers * prefill.group.dp, ranks, token_bytes / link_bytes_per_s(row.system))
    loop = _loop(row, how, added, row.concurrency, pool.tokens * ranks)
    return _run_apart(sender, receiver, replace(added, first_s=0.0), loop, fleet)


@cache
def _run_apart(sender: Served, receiver: Served, added: Added, loop: Loop, fleet: Fleet) -> Estimate:
    return _means(apart(_times(sender, added), _times(receiver, added), loop, fleet))


def _pools(row: Row) -> tuple[Pool, Pool]:
    assert row.prefill is not None
    assert row.decode is not None
    return row.prefill, row.decode


def _loop(row: Row, how: Serving, added: Added, concurrency: int, pool: float) -> Loop:
    hopper, requests = row.system in HOPPER, ROUNDS * concurrency
    budget = BUDGET if hopper else LARGE_BUDGET
    loop = Loop(row.prompt, row.output, concurrency, requests, budget, how.mixes, pool, added.reserved, accept_s=added.accept_s)
    if (row.prompt, row.output) not in INFERENCE_MAX:
        return replace(loop, shortest=1 - SPREAD, longest=1 + SPREAD, slots=max(concurrency - int(added.short), 1))
    if row.framework != "sglang" or hopper:
        return replace(loop, shortest=SHORTEST)
    return replace(loop, shortest=SHORTEST, look_every=BUSY_LOOK_EVERY if row.concurrency >= BUSY else LOOK_EVERY)


def _times(what: Served, added: Added) -> EngineTimes:
    return EngineTimes(kernels(what), facts(what.path).layers, added)
