"""How long steps take: decodes and prefills alone, on each level, beside each other; a change of the split; the host's part.

All of it on the shape of Llama-3.1-8B with random weights, in the runner that serves, from launch to collect.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median

from pdmux_ray.device.cuda.probe import WARM_UP
from pdmux_ray.device.cuda.runner import CudaRunner
from pdmux_ray.engine.engine import Engine
from pdmux_ray.engine.runner import StepBatch
from pdmux_ray.gpu_check.lab import Lab
from pdmux_ray.gpu_check.report import Limit, Row
from pdmux_ray.gpu_check.settings import Multiplex, Settings
from pdmux_ray.latency.design import Point
from pdmux_ray.latency.measure import PointBench, StillSequence
from pdmux_ray.latency.records import Record, percentile
from pdmux_ray.policy.fake_costs import FakeCosts
from pdmux_ray.policy.views import Piece
from pdmux_ray.types import Mode, NewRequest, SamplingParams, Split, TokenEvent

DECODE_BANDWIDTH = Limit(75.0, at_least=True)  # percent of the measured copy bandwidth, in useful bytes, on every SM
PREFILL_RATE = Limit(70.0, at_least=True)  # percent of the measured bf16 matrix rate, on every SM
BESIDE = Limit(1.4)  # p99 of a step beside a prefill, by the median alone on the same SMs, at the level that would be picked
SWITCH_US = Limit(200.0)  # what the first step after a change of the split costs more
HOST_MS = Limit(0.5)  # of a decode step
ITL_S = 0.02  # the objective by which a level is picked: that of the public MuxWise code for an 8B model
MOST_STEPS = 8  # decode steps that are launched together, where the runner takes so many

_BLOCK_S = 0.02  # of a prefill's blocks
_LOOKS = 30  # of what the host spends
_SHORT = 64  # tokens
_ENDLESS = 1_000_000  # tokens: no answer ends by itself


def decode(lab: Lab) -> Iterator[Row]:
    """Every SM in bursts, as it serves; then each level."""
    runner, sizes = _open(lab), lab.sizes
    sequences = still(runner, sizes.decode_batch, sizes.decode_context)
    seconds = median(burst_s(runner, sequences, sizes.decode_steps))
    useful = sizes.middle.decode_bytes(sizes.decode_batch, sizes.decode_context)
    share = 100 * useful / seconds / lab.rates.copy_bytes_per_s
    what = f"batch {sizes.decode_batch}, context {sizes.decode_context}"
    yield Row(f"step, {what}, every SM", 1e3 * seconds, "ms", note=f"{useful / 1e9:.1f} GB to read")
    yield lab.row(DECODE_BANDWIDTH, "of the copy bandwidth, in useful bytes", share, "%")
    for name, split in [*lab.each_split(), ("every SM", Split(0, runner.units))]:
        record = _decodes(lab, split)[0]
        p99 = percentile(record.times_s, 99)
        yield Row(f"{name}: step by itself, median", 1e3 * record.median_s, "ms", note=f"p99 {1e3 * p99:.2f}")


def prefill(lab: Lab) -> Iterator[Row]:
    """Time per layer on each level, in blocks; then a whole prompt's rate on every SM."""
    runner, sizes = _open(lab), lab.sizes
    for name, split in [*lab.each_split(), ("every SM", Split(runner.units, 0))]:
        point = Point("prefill", "fit", split, (), (Piece(sizes.prefill_tokens, 0),), sizes.prefill_blocks, _BLOCK_S)
        records = [record for record in _bench(lab).measure(point) if not record.last] or _bench(lab).measure(point)
        seconds = median([took / record.layers for record in records for took in record.times_s])
        rate = sizes.middle.prefill_flop(sizes.prefill_tokens) / sizes.middle.layers / seconds
        note = f"{rate / 1e12:.0f} TFLOP/s"
        yield Row(f"{name}: a layer of {sizes.prefill_tokens} tokens", 1e3 * seconds, "ms", note=note)
    yield lab.row(PREFILL_RATE, "every SM: of the matrix rate", 100 * rate / lab.rates.flop_per_s, "%")


def beside(lab: Lab) -> Iterator[Row]:
    """Decodes alone, then beside a prefill that never ends, on each level. The level that is judged is the one with the fewest
    SMs for decode whose measured p99 keeps the objective; when none does, the one nearest to it. The dispatcher takes the same
    rule to predicted bounds (`policy.sharing.fewest_units`), so it may pick another level."""
    found: list[tuple[float, str, float]] = []
    for name, split in lab.each_split():
        alone = _decodes(lab, split)[0]
        together = [record for record in _decodes(lab, split, prefill=True) if record.kind == "decode"]
        if not together:
            yield Row(f"{name}: no step ran beside a block throughout", "none")
            continue
        p99 = percentile(together[0].times_s, 99)
        found.append((p99, name, p99 / alone.median_s))
        yield Row(f"{name}: p99 beside a prefill", 1e3 * p99, "ms", note=f"{found[-1][2]:.2f} x the median alone")
    if not found:
        yield lab.row(BESIDE, "p99 beside / median alone: nothing was measured", float("nan"), "x")
        return
    p99, name, ratio = next((one for one in found if one[0] <= ITL_S), min(found))
    yield lab.row(BESIDE, f"{name}, picked for {1e3 * ITL_S:.0f} ms: p99 / median alone", ratio, "x")


def switch(lab: Lab) -> Iterator[Row]:
    for name, split in lab.each_split():
        yield lab.row(SWITCH_US, f"every SM, then {name}", 1e6 * _bench(lab).switch_s(split), "us")


def host(lab: Lab) -> Iterator[Row]:
    """Launch, and collect when the device is done: what a step costs the host when it waits for nothing. Then what a step of
    the whole engine takes more than the runner's own, in bursts, in single steps, and beside a prefill's blocks: that is
    planning and publishing, too, and whatever else keeps the device idle between two launches."""
    runner, sizes = _open(lab), lab.sizes
    sequences = still(runner, sizes.decode_batch, sizes.decode_context)
    step_s = max(burst_s(runner, sequences, WARM_UP))
    spent: list[float] = []
    for _ in range(2 if lab.dry else _LOOKS):
        begin = time.perf_counter()
        runner.launch(StepBatch(sequences, []))
        launched = time.perf_counter()
        lab.clock.sleep(0.0 if lab.dry else 3 * step_s)
        again = time.perf_counter()
        runner.collect()
        spent.append(launched - begin + time.perf_counter() - again)
    yield lab.row(HOST_MS, f"launch and collect, batch {sizes.decode_batch}, median", 1e3 * median(spent), "ms")
    yield from _engine_steps(lab)


def _engine_steps(lab: Lab) -> Iterator[Row]:
    """Short contexts, whose steps are short, and the same for engine and runner."""
    runner, sizes = _open(lab), lab.sizes
    context = min(_SHORT, sizes.decode_context)
    alone_s = median(burst_s(runner, still(runner, sizes.decode_batch, context), sizes.decode_steps))
    quick = FakeCosts(units=runner.units, layers=runner.layers, fixed_s=1e-5, weights_s=1e-5, request_s=0.0, context_s=0.0)
    more_ms = 1e3 * (fmean(engine_gaps_s(lab, context, quick)) - alone_s)
    yield Row("the engine in bursts: more than the runner", more_ms, "ms", note=f"a step of the runner {1e3 * alone_s:.2f}")
    more_ms = 1e3 * (median(engine_gaps_s(lab, context)) - alone_s)
    yield lab.row(HOST_MS, "the engine step by step: more than the runner", more_ms, "ms", "as while anybody waits")
    if not runner.splits:
        return
    split = runner.splits[len(runner.splits) // 2]
    gaps_s = engine_gaps_s(lab, context, beside=split)
    point = Point(
        "decode", "fit", split, (context,) * sizes.decode_batch, (Piece(sizes.prefill_tokens, 0),), sizes.decode_steps // 2 or 1
    )
    steps = [record for record in _bench(lab).measure(point) if record.kind == "decode"]
    if gaps_s and steps:
        note = f"{split.prefill_units}/{split.decode_units}; a step of the runner {1e3 * steps[0].median_s:.2f}"
        yield Row("the engine beside a prefill: more", 1e3 * (median(gaps_s) - steps[0].median_s), "ms", note=note)


def engine_gaps_s(lab: Lab, context: int, costs: FakeCosts | None = None, beside: Split | None = None) -> list[float]:
    """Seconds between two tokens of a request, one of a batch that decodes, through the engine. Step by step without `costs`;
    bursts need a prediction. With `beside` only those during a long prefill on that split; it may have none."""
    runner, sizes, at_s = _open(lab), lab.sizes, dict[str, list[float]]()
    units = beside.decode_units if beside else None
    fixed = Multiplex(policy="fixed", decode_units=units, block_layers=max(1, runner.layers // 8))
    mode = Mode.AUTO if costs else Mode.SPLIT if beside else Mode.TIME_SHARED
    settings = replace(_settings(lab), mode=mode, max_batch=sizes.decode_batch + 1)
    if costs is None:
        settings = replace(settings, multiplex=fixed)

    def publish(sink: str, events: list[TokenEvent]) -> None:
        for event in events:
            at_s.setdefault(event.request_id, []).append(time.perf_counter())

    engine = Engine(runner, settings.limits(sizes.middle.context_length, sizes.middle.vocab_size), publish, costs=costs)
    params = SamplingParams(max_tokens=_ENDLESS, temperature=0.0, ignore_eos=True)
    names = [str(row) for row in range(sizes.decode_batch)]
    for row, name in enumerate(names):
        engine.submit(NewRequest(name, (3 + row % 64,) * context, params))
    while len(at_s) < len(names) and engine.step():
        pass
    if beside:
        names.append("long")
        engine.submit(NewRequest("long", (3,) * sizes.prefill_tokens, params))
    first = len(at_s["0"]) + (0 if beside else WARM_UP)
    while ("long" not in at_s if beside else len(at_s["0"]) <= first + sizes.decode_steps) and engine.step():
        pass
    engine.abort(names)
    while engine.step():
        pass
    return [after - before for before, after in pairwise(at_s["0"][first:-1])]


def still(runner: CudaRunner, batch: int, context: int) -> list[StillSequence]:
    """Requests of so many tokens that never grow, with pages for a burst of steps."""
    count = -(-(context + MOST_STEPS) // runner.page_size)
    return [
        StillSequence(f"check-{row}", [row % 64] * context, list(range(row * count, (row + 1) * count))) for row in range(batch)
    ]


def burst_s(runner: CudaRunner, sequences: Sequence[StillSequence], count: int) -> list[float]:
    """Seconds a decode step on every SM, by bursts of as many as the runner takes."""
    steps = min(MOST_STEPS, runner.most_steps)
    found: list[float] = []
    for turn in range(WARM_UP + -(-count // steps)):
        begin = time.perf_counter()
        runner.launch(StepBatch(sequences, [], steps))
        for _ in range(steps):
            runner.collect()
        if turn >= WARM_UP:
            found.append((time.perf_counter() - begin) / steps)
    return found


def _settings(lab: Lab) -> Settings:
    sizes = lab.sizes
    return replace(
        lab.settings(sizes.kv_gib[1], sizes.decode_batch, sizes.prefill_tokens, Multiplex(itl_s=ITL_S)),
        context_length=min(sizes.middle.context_length, max(128, 2 * sizes.prefill_tokens, 2 * sizes.decode_context)),
    )


def _open(lab: Lab) -> CudaRunner:
    return lab.runner(lab.sizes.middle, _settings(lab))


def _bench(lab: Lab) -> PointBench:
    return PointBench(_open(lab), lab.clock)


def _decodes(lab: Lab, split: Split, *, prefill: bool = False) -> list[Record]:
    sizes = lab.sizes
    contexts = (sizes.decode_context,) * sizes.decode_batch
    pieces = (Piece(sizes.prefill_tokens, 0),) if prefill else ()
    return _bench(lab).measure(Point("decode", "fit", split, contexts, pieces, sizes.decode_steps))
