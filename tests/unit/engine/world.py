"""What the engine's tests share: a strict fake device, a log of events, and what every request must end up with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Condition
from typing import Any

from pdmux_ray.clock import Clock, VirtualClock
from pdmux_ray.engine.engine import Engine
from pdmux_ray.engine.fake_runner import FakeRunner, _extend, fake_token
from pdmux_ray.engine.limits import EngineLimits
from pdmux_ray.engine.runner import Runner, SequenceView
from pdmux_ray.types import FinishReason, Mode, NewRequest, SamplingParams, TokenEvent

VOCAB = 50
EOS = 7
PAGE = 4

BASE = EngineLimits(
    context_length=64,
    vocab_size=VOCAB,
    eos_token_ids=frozenset({EOS}),
    mode=Mode.PREFILL_FIRST,
    chunk_tokens=8,
    max_prefill_tokens=32,
    max_batch=4,
    max_waiting=100,
    prefix_cache=True,
    stall_timeout_s=30.0,
)


def limits(**changes: object) -> EngineLimits:
    return replace(BASE, **changes)  # type: ignore[arg-type]


def request(name: str, prompt: Sequence[int] = (1, 2, 3), sink: str = "s", **params: object) -> NewRequest:
    """Greedy and free of end-of-sequence tokens unless told otherwise."""
    values = {"max_tokens": 5, "ignore_eos": True, **params}
    return NewRequest(name, tuple(prompt), SamplingParams(**values), sink=sink)  # type: ignore[arg-type]


class StrictRunner(FakeRunner):
    """Reads every earlier position of a sequence, as attention does, and objects to KV that is not that of its tokens."""

    def _entries(self, sequence: SequenceView, start: int, count: int) -> list[tuple[int, int]]:
        kv = 0
        for position in range(start):
            kv = _extend(kv, sequence.tokens[position])
            slot = sequence.pages[position // self.page_size] * self.page_size + position % self.page_size
            assert self._kv[slot] == kv, f"{sequence.request_id} reads foreign KV at position {position} of {sequence.tokens}"
        return super()._entries(sequence, start, count)


class Log:
    """A sink for events: keeps them by request; lets a test wait until requests have ended."""

    def __init__(self) -> None:
        self.events: dict[str, list[TokenEvent]] = {}
        self._changed = Condition()

    def __call__(self, sink: str, events: list[TokenEvent]) -> None:
        with self._changed:
            for event in events:
                self.events.setdefault(event.request_id, []).append(event)
            self._changed.notify_all()

    def tokens(self, name: str) -> list[int]:
        return [event.token for event in self.events.get(name, []) if event.token is not None]

    def finish(self, name: str) -> FinishReason | None:
        events = self.events.get(name)
        return events[-1].finish if events else None

    def error(self, name: str) -> tuple[str | None, str | None]:
        """(class name, message) that ended it."""
        last = self.events[name][-1]
        return last.error_type, last.error

    def wait_for_ends(self, names: Sequence[str]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: all(self.finish(name) for name in names), timeout=60)

    def wait_for_tokens(self, name: str, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.tokens(name)) >= count, timeout=60)

    def assert_each_ended_at_most_once(self) -> None:
        for name, events in self.events.items():
            ends = [index for index, event in enumerate(events) if event.finish is not None]
            assert ends in ([], [len(events) - 1]), f"{name}: {events}"
            told = [index for index, event in enumerate(events) if event.cached_tokens is not None]
            broken = events[0].finish is FinishReason.ERROR  # a breach may have lost its news
            assert told == [0] or (broken and not told), f"{name}: {events}"


def expected(new: NewRequest, bounds: EngineLimits) -> tuple[list[int], FinishReason]:
    """What a request must generate, from the rules alone: no batches, pages, chunks or caches."""
    params = new.params
    known = list(new.prompt)
    generated: list[int] = []
    while True:
        token = fake_token(params.seed, known, bounds.vocab_size)
        known.append(token)
        generated.append(token)
        stops = token in params.stop_token_ids or (token in bounds.eos_token_ids and not params.ignore_eos)
        if stops and len(generated) > params.min_tokens:
            return generated, FinishReason.STOP
        if len(generated) == params.max_tokens or len(known) == bounds.context_length:
            return generated, FinishReason.LENGTH


class Worlds:
    """Makes engines; at the end of a test each is closed and its pages, queues and events are checked."""

    def __init__(self) -> None:
        self._made: list[tuple[Engine, Log]] = []

    def __call__(
        self,
        bounds: EngineLimits | None = None,
        pages: int = 64,
        runner: Callable[[Clock], Runner] | None = None,
        clock: Clock | None = None,
        **more: Any,
    ) -> tuple[Engine, Log]:
        clock = clock or VirtualClock()
        device = runner(clock) if runner else StrictRunner(pages, PAGE, 0.01, 0.001, clock, vocab_size=VOCAB)
        log = Log()
        engine = Engine(device, bounds or limits(), log, clock, **more)
        self._made.append((engine, log))
        return engine, log

    def close(self) -> None:
        for engine, log in self._made:
            broken = engine.problem()
            engine.close()
            log.assert_each_ended_at_most_once()
            load = engine.load()
            assert load.running == load.waiting == 0 or broken
            if not broken:
                engine.check_integrity()
                assert load.free_pages == load.total_pages
