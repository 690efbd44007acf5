"""`python -m pdmux_ray.bench.lanes`: how far a prefill on one lane disturbs the decodes on the other, with the bare runner.

Decode steps alone (on every core, and on the split's decode cores), then beside the prefill of one long prompt, which runs in
blocks of layers: on disjoint cores (split), and on its cores with the decodes on every one (capped). A gap is the time from one
step's tokens to the next's. What else runs on the machine shows in the largest gaps: repeat, and leave it alone meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pdmux_ray.bench.isolation import LARGEST_LIMIT, P99_LIMIT
from pdmux_ray.bench.runner_step import RunnerBench
from pdmux_ray.config import EngineConfig
from pdmux_ray.device.base import build_runner
from pdmux_ray.engine.limits import with_lanes
from pdmux_ray.engine.runner import LaneRunner, PrefillSlice, StepBatch
from pdmux_ray.metrics.lifeline import quantile
from pdmux_ray.model.source import resolve
from pdmux_ray.types import Mode, SamplingParams, Split

CONTEXT = 300  # tokens of each decoding request at the start of each measurement
ALONE_STEPS = 60


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds."""

    what: str
    gaps_s: list[float]
    prefill_s: float | None = None

    @property
    def median_s(self) -> float:
        return statistics.median(self.gaps_s)

    @property
    def p99_s(self) -> float:
        return quantile(sorted(self.gaps_s), 0.99)


class LaneBench:
    """Drives the lanes as the engine's loop does: decode steps one after the other, blocks as the prefill lane is free."""

    def __init__(self, runner: LaneRunner, vocab_size: int, decodes: int, prompt_tokens: int) -> None:
        self._runner = runner
        params = SamplingParams(temperature=0.0, max_tokens=2**20)
        bench = RunnerBench(runner, vocab_size, params)
        self._running = bench.sequences(decodes, CONTEXT, room=2048)
        for sequence in self._running:
            bench.step_s(StepBatch([], [PrefillSlice(sequence, 0, CONTEXT, True)]))
        used = sum(len(sequence.pages) for sequence in self._running)
        (self._long,) = bench.sequences(1, prompt_tokens, room=1, first_page=used)

    def alone(self, what: str, split: Split | None) -> Measured:
        self._rewind()
        self._step(split)
        return Measured(what, [self._step(split) for _ in range(ALONE_STEPS)])

    def beside(self, what: str, split: Split, block_layers: int) -> Measured:
        """Every decode step from the prefill's first block to the end of its last."""
        self._rewind()
        self._step(split)
        gaps_s, layers = list[float](), 0
        started = last = time.perf_counter()
        self._runner.open_job(0, [PrefillSlice(self._long, 0, len(self._long.tokens), True)])
        finished = None
        while finished is None:
            if layers == 0 or self._runner.block_done():
                if layers:
                    finished = self._runner.collect_block()
                if finished is None:
                    layers = min(self._runner.layers, layers + block_layers)
                    self._runner.launch_block(0, layers, split)
            self._step(split)
            last, before = time.perf_counter(), last
            gaps_s.append(last - before)
        return Measured(what, gaps_s, time.perf_counter() - started)

    def prefill_alone_s(self, split: Split) -> float:
        started = time.perf_counter()
        self._runner.open_job(0, [PrefillSlice(self._long, 0, len(self._long.tokens), True)])
        self._runner.launch_block(0, self._runner.layers, split)
        self._runner.collect_block()
        return time.perf_counter() - started

    def _rewind(self) -> None:
        """Back to the same context; what lies in the pages beyond it is written anew."""
        for sequence in self._running:
            del sequence.tokens[CONTEXT + 1 :]

    def _step(self, split: Split | None) -> float:
        started = time.perf_counter()
        self._runner.launch(StepBatch(self._running, []), split=split)
        output = self._runner.collect()
        assert output is not None
        for sequence, token in zip(self._running, output.tokens, strict=True):
            sequence.tokens.append(token)
        return time.perf_counter() - started


def measure(bench: LaneBench, split: Split, units: int, block_layers: int) -> list[Measured]:
    whole, capped = Split(units, units), Split(split.prefill_units, units)
    return [
        bench.alone(f"alone, no lanes, {units} cores", None),
        bench.alone(f"alone, on the decode lane, {units} cores", whole),
        bench.alone(f"alone, on the decode lane, {split.decode_units} of {units} cores", split),
        bench.beside(f"beside, split {split.prefill_units} + {split.decode_units}", split, block_layers),
        bench.beside(f"beside, capped {split.prefill_units} of {units}", capped, block_layers),
    ]


def print_table(rows: Sequence[Measured]) -> None:
    base_s = rows[0].median_s
    columns = ("gaps", "median ms", "p99 ms", "largest ms", "p99 x", "largest x", "prefill s")
    print(f"{'decode steps':44}" + "".join(f"{column:>11}" for column in columns))
    for row in rows:
        largest_s = max(row.gaps_s)
        cells = [f"{len(row.gaps_s)}", *(f"{value * 1e3:.2f}" for value in (row.median_s, row.p99_s, largest_s))]
        cells += [f"{value / base_s:.2f}" for value in (row.p99_s, largest_s)]
        cells += [] if row.prefill_s is None else [f"{row.prefill_s:.2f}"]
        print(f"{row.what:44}" + "".join(f"{cell:>11}" for cell in cells), flush=True)


def verdict(rows: Sequence[Measured]) -> str:
    alone, split = rows[0], rows[3]
    kept = split.p99_s <= P99_LIMIT * alone.median_s and max(split.gaps_s) <= LARGEST_LIMIT * alone.median_s
    return f"limits (split: p99 <= {P99_LIMIT} x, largest <= {LARGEST_LIMIT} x the median alone): {'met' if kept else 'MISSED'}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--decodes", type=int, default=4, help="requests that decode")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens that are prefilled beside them")
    parser.add_argument("--block-layers", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    args = _arguments()
    directory = resolve(args.model)
    settings = {"device": "cpu", "dtype": args.dtype, "mode": Mode.SPLIT}
    runner = build_runner(directory, EngineConfig.model_validate(settings))  # before torch is imported: it limits spinning

    from pdmux_ray.device.cpu.runner import CpuRunner
    from pdmux_ray.model.config import DecoderConfig

    assert isinstance(runner, CpuRunner)
    splits = with_lanes(runner, Mode.SPLIT).splits
    split = splits[(len(splits) - 1) // 2]
    bench = LaneBench(runner, DecoderConfig.from_pretrained(directory).vocab_size, args.decodes, args.prompt)
    for _ in range(args.repeats):
        rows = measure(bench, split, runner.units, args.block_layers)
        print_table(rows)
        alone_s = [bench.prefill_alone_s(Split(units, units)) for units in (runner.units, split.prefill_units)]
        print(f"the prefill alone: {alone_s[0]:.2f} s on {runner.units} cores, {alone_s[1]:.2f} s on {split.prefill_units}")
        print(verdict(rows), flush=True)
    runner.close()


if __name__ == "__main__":
    main()
