"""Devices that misbehave, or wait for the test."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pdmux_ray.clock import Clock
from pdmux_ray.engine.runner import GiveUp, StepBatch, StepOutput, never
from pdmux_ray.types import Split

from .world import PAGE, VOCAB, StrictRunner


class GatedRunner(StrictRunner):
    """Each step waits until the test lets it through."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(64, PAGE, 0.0, 0.0, clock, vocab_size=VOCAB)
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)

    def collect(self) -> StepOutput | None:
        self.entered.release()
        assert self.gate.acquire(timeout=60)
        return super().collect()


class FailingRunner(StrictRunner):
    """Fails in one step."""

    def __init__(self, clock: Clock, failing_step: int) -> None:
        super().__init__(64, PAGE, 0.01, 0.0, clock, vocab_size=VOCAB)
        self._steps_until_failure = failing_step

    def collect(self) -> StepOutput | None:
        self._steps_until_failure -= 1
        if self._steps_until_failure == 0:
            raise RuntimeError("out of memory")
        return super().collect()


class LyingRunner(StrictRunner):
    """Answers with a token too many."""

    def collect(self) -> StepOutput | None:
        output = super().collect()
        assert output is not None
        output.tokens.append(0)
        return output


class VandalRunner(StrictRunner):
    """Writes a page that nobody holds into a request's page table."""

    def launch(self, batch: StepBatch, give_up: GiveUp = never, split: Split | None = None) -> None:
        super().launch(batch, give_up, split)
        pages = batch.prefills[0].sequence.pages
        assert isinstance(pages, list)
        pages.append(63)


class SlowRunner(StrictRunner):
    """A step takes so long that the clock passes the stall timeout; notes what the engine says of itself meanwhile."""

    ask: Callable[[], str | None]
    answer: str | None = None

    def collect(self) -> StepOutput | None:
        self._clock.sleep(31.0)
        self.answer = self.ask()
        return super().collect()


class LayeredRunner(StrictRunner):
    """Computes a pass with prefills layer by layer, and asks before each."""

    layers_done = 0

    def launch(self, batch: StepBatch, give_up: GiveUp = never, split: Split | None = None) -> None:
        for layer in range(self.layers if batch.prefills else 0):
            self.layers_done = layer
            assert not give_up()
        super().launch(batch, never, split)


class InterruptedRunner(StrictRunner):
    """A prefill takes a while; once, in its midst, `interrupt` is called."""

    interrupt: Callable[[], None]
    given_up = 0

    def __init__(self, clock: Clock) -> None:
        super().__init__(64, PAGE, 0.01, 0.1, clock, vocab_size=VOCAB)

    def launch(self, batch: StepBatch, give_up: GiveUp = never, split: Split | None = None) -> None:
        if batch.prefills and hasattr(self, "interrupt"):
            self.interrupt()
            del self.interrupt
        super().launch(batch, give_up, split)

    def collect(self) -> StepOutput | None:
        output = super().collect()
        self.given_up += output is None
        return output
