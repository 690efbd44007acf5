"""`python -m pdmux_ray.bench.runner_step`: how long the CPU runner's steps take, without engine or HTTP.

Decode steps (with sampling) at several batch sizes, and whole prefills, of random tokens: median and least time. Where the
two are far apart, something else used the cores.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pdmux_ray.config import EngineConfig
from pdmux_ray.device.base import build_runner
from pdmux_ray.engine.runner import PrefillSlice, Runner, StepBatch
from pdmux_ray.model.source import resolve
from pdmux_ray.types import SamplingParams


@dataclass
class BenchSequence:
    request_id: str
    tokens: list[int]
    prompt_tokens: int
    pages: Sequence[int]
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()


class RunnerBench:
    def __init__(self, runner: Runner, vocab_size: int, params: SamplingParams) -> None:
        self._runner, self._vocab_size, self._params = runner, vocab_size, params
        self._rng = random.Random(0)

    def sequences(self, count: int, tokens: int, room: int, first_page: int = 0) -> list[BenchSequence]:
        """Random prompts with own pages for `room` tokens more. The pages are handed out from `first_page` on each call."""
        pages = -(-(tokens + room) // self._runner.page_size)
        if first_page + count * pages > self._runner.pages:
            raise SystemExit(f"{count} x {tokens} tokens do not fit the KV pool; raise --kv-cache-gib")
        owned = [range(first_page + index * pages, first_page + (index + 1) * pages) for index in range(count)]
        prompts = [[self._rng.randrange(self._vocab_size) for _ in range(tokens)] for _ in range(count)]
        return [BenchSequence(f"r{i}", prompts[i], tokens, owned[i], self._params) for i in range(count)]

    def step_s(self, batch: StepBatch) -> float:
        """Seconds of one step; its tokens are appended to their requests."""
        started = time.perf_counter()
        self._runner.launch(batch)
        output = self._runner.collect()
        took = time.perf_counter() - started
        assert output is not None
        for sequence, token in zip([*batch.decodes, *(p.sequence for p in batch.prefills)], output.tokens, strict=True):
            assert isinstance(sequence, BenchSequence)
            sequence.tokens.append(token)
        return took

    def decode_s(self, count: int, context: int, steps: int) -> list[float]:
        running = self.sequences(count, context, steps + 2)
        for sequence in running:
            self.step_s(StepBatch([], [PrefillSlice(sequence, 0, context, True)]))
        return [self.step_s(StepBatch(running, [])) for _ in range(steps + 2)][2:]

    def prefill_s(self, tokens: int, repeats: int) -> list[float]:
        def once() -> float:
            (sequence,) = self.sequences(1, tokens, 1)
            return self.step_s(StepBatch([], [PrefillSlice(sequence, 0, tokens, True)]))

        return [once() for _ in range(repeats)]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--batches", type=_numbers, default=[1, 4, 8, 16])
    parser.add_argument("--context", type=int, default=300, help="tokens before the first decode step")
    parser.add_argument("--prompts", type=_numbers, default=[256, 1024, 2048])
    parser.add_argument("--steps", type=int, default=30, help="decode steps measured at each batch size")
    parser.add_argument("--repeats", type=int, default=3, help="prefills measured at each length")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--kv-cache-gib", type=float, default=1.0)
    parser.add_argument("--threads", type=int)
    return parser.parse_args()


def _measure(dtype: str, directory: Path, args: argparse.Namespace) -> None:
    config = EngineConfig.model_validate(
        {"device": "cpu", "dtype": dtype, "threads": args.threads, "kv_cache_gib": args.kv_cache_gib}
    )
    params = SamplingParams(temperature=args.temperature, top_p=args.top_p, max_tokens=2**20)
    runner = build_runner(directory, config)  # before torch is imported: it limits spinning

    from pdmux_ray.model.config import DecoderConfig

    bench = RunnerBench(runner, DecoderConfig.from_pretrained(directory).vocab_size, params)

    def report(name: str, measure: Callable[[], list[float]]) -> None:
        print(f"measuring {dtype}: {name} ...", end="\r", file=sys.stderr, flush=True)
        took_ms = [took * 1e3 for took in measure()]
        print("\x1b[K", end="", file=sys.stderr, flush=True)
        print(f"{dtype:10} {name:28} {statistics.median(took_ms):9.2f} {min(took_ms):9.2f}", flush=True)

    for count in args.batches:
        report(f"decode {count} x {args.context} tokens", partial(bench.decode_s, count, args.context, args.steps))
    for tokens in args.prompts:
        report(f"prefill {tokens} tokens", partial(bench.prefill_s, tokens, args.repeats))
    runner.close()


def main() -> None:
    args = _arguments()
    directory = resolve(args.model)
    print(f"{'dtype':10} {'step':28} {'median ms':>9} {'least ms':>9}")
    for dtype in args.dtypes.split(","):
        _measure(dtype, directory, args)


if __name__ == "__main__":
    main()
