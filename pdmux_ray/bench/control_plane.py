"""What a step costs apart from the device: plan, apply, commit and publish, with the runner's own time taken out.

    python -m pdmux_ray.bench.control_plane [--steps N]

The batch is kept full: a request that ends is replaced at once, so page growth, prefix cache, starts and ends are all in the
figures. They are CPU time of the loop's thread, so that other work on the machine does not blur them.

The second table shows what a busy Python thread in the same process (an event loop, say) costs: by how much a runner that
sleeps, and so gives up the GIL, oversleeps. A device pays this each time that its code gives up the GIL.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from statistics import mean, quantiles

from pdmux_ray.clock import VirtualClock
from pdmux_ray.engine.engine import Engine
from pdmux_ray.engine.fake_runner import FakeRunner
from pdmux_ray.engine.limits import EngineLimits
from pdmux_ray.engine.runner import GiveUp, StepBatch, StepOutput, never
from pdmux_ray.types import Mode, NewRequest, SamplingParams, Split, TokenEvent

_BATCHES = (1, 16, 64, 256)
_SINKS = 4
_VOCAB_SIZE = 32_000


class _TimedRunner(FakeRunner):
    """Adds up the CPU seconds spent inside the runner."""

    spent_s = 0.0

    def launch(self, batch: StepBatch, give_up: GiveUp = never, split: Split | None = None) -> None:
        start_s = time.thread_time()
        super().launch(batch, give_up, split)
        self.spent_s += time.thread_time() - start_s

    def collect(self) -> StepOutput | None:
        start_s = time.thread_time()
        output = super().collect()
        self.spent_s += time.thread_time() - start_s
        return output


class Feed:
    """Keeps `batch` requests live, with prompts of 32 to 256 tokens and 32 to 512 tokens to generate."""

    def __init__(self, mode: Mode, batch: int) -> None:
        clock = VirtualClock()
        self.runner = _TimedRunner(batch * 64, 16, 0.02, 0.0, clock, vocab_size=_VOCAB_SIZE)
        limits = EngineLimits(
            context_length=1024,
            vocab_size=_VOCAB_SIZE,
            eos_token_ids=frozenset({2}),
            mode=mode,
            chunk_tokens=batch + 256,
            max_prefill_tokens=2048,
            max_batch=batch,
            max_waiting=batch,
            prefix_cache=True,
            stall_timeout_s=60.0,
        )
        self.engine = Engine(self.runner, limits, self._publish, clock)
        self._rng = random.Random(0)
        self._submitted = 0
        self._ended = batch

    def refill(self) -> None:
        while self._ended:
            self._ended -= 1
            self._submitted += 1
            prompt = tuple(self._rng.randrange(_VOCAB_SIZE) for _ in range(self._rng.randrange(32, 256)))
            params = SamplingParams(max_tokens=self._rng.randrange(32, 512), ignore_eos=True)
            self.engine.submit(
                NewRequest(f"request-{self._submitted}", prompt, params, sink=f"gateway-{self._submitted % _SINKS}")
            )

    def step_s(self) -> float:
        """Runs one step and returns its CPU seconds outside the runner."""
        self.refill()
        self.runner.spent_s = 0.0
        start_s = time.thread_time()
        self.engine.step()
        return time.thread_time() - start_s - self.runner.spent_s

    def _publish(self, sink: str, events: list[TokenEvent]) -> None:
        self._ended += sum(event.finish is not None for event in events)


def measure(mode: Mode, batch: int, steps: int) -> list[float]:
    """Microseconds of each of `steps` steps, after a warm-up in which the requests' lengths spread out."""
    feed = Feed(mode, batch)
    for _ in range(300):
        feed.step_s()
    times = [feed.step_s() * 1e6 for _ in range(steps)]
    feed.engine.close()
    feed.engine.check_integrity()
    return times


def gil_wait_s(switch_interval_s: float, sleeps: int) -> float:
    """Mean seconds by which `time.sleep` overshoots beside a thread that is always busy in Python."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(1000))

    before_s = sys.getswitchinterval()
    sys.setswitchinterval(switch_interval_s)
    thread = threading.Thread(target=spin)
    thread.start()
    try:
        start_s = time.perf_counter()
        for _ in range(sleeps):
            time.sleep(0.001)
        return (time.perf_counter() - start_s) / sleeps - 0.001
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(before_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=1000, help="measured steps of each row")
    steps = parser.parse_args().steps
    print("control plane, µs per step")
    print(f"{'mode':>14} {'batch':>6} {'mean':>8} {'p50':>8} {'p99':>8} {'max':>8}")
    for mode in Mode:
        for batch in _BATCHES:
            times = measure(mode, batch, steps)
            cuts = quantiles(times, n=100)
            print(
                f"{mode.value:>14} {batch:>6} {mean(times):8.1f} {cuts[49]:8.1f} {cuts[98]:8.1f} {max(times):8.1f}", flush=True
            )
    print("\nwait for the GIL beside a busy thread, each time the device code gives it up")
    for interval_s in (0.005, 0.001, 0.0005, 0.0001):
        print(f"  switch interval {interval_s * 1e3:g} ms: {gil_wait_s(interval_s, 100) * 1e3:.2f} ms", flush=True)


if __name__ == "__main__":
    main()
