"""Requests that come when they are planned to, whatever the engine does, until each can be judged: one engine in this thread.

A request is submitted before the first step that begins after it is due, which is when an engine with a thread of its own would
take it in. Torch-free.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdmux_ray.clock import Clock
from pdmux_ray.engine.engine import Engine
from pdmux_ray.engine.loop import Publish
from pdmux_ray.metrics.goodput import Slo, Verdict
from pdmux_ray.metrics.lifeline import Lifeline
from pdmux_ray.types import FinishReason, NewRequest, SamplingParams, TokenEvent
from pdmux_ray.workload.requests import PlannedRequest

_REST_S = 0.001  # an idle engine looks at its mail this often


@dataclass(frozen=True, slots=True)
class Offered:
    """`lifelines`: of the requests that can be judged. `open`: the others, which had no first token, were not late, or were not
    even due when the run was ended before its time. `missed`: so many had missed their objectives by then that it was."""

    lifelines: Sequence[Lifeline]
    open: int
    missed: bool

    @property
    def decided(self) -> bool:
        """Whether it tells if the attainment is kept."""
        return not self.open or self.missed


class OpenLoop:
    """One run. Owner: the check. `make` makes the engine, which publishes to what it is given."""

    def __init__(self, make: Callable[[Publish], Engine], clock: Clock, slo: Slo) -> None:
        self._engine, self._clock, self._slo = make(self._publish), clock, slo
        self._lines: dict[str, Lifeline] = {}
        self._live: set[str] = set()
        self._misses = 0  # of requests that have ended

    def run(self, planned: Sequence[PlannedRequest], seconds: float, most_misses: float = math.inf) -> Offered:
        """Offers what is planned, and goes on until everyone has a first token or is late with it; but ends after `seconds`,
        and as soon as more than `most_misses` have missed their objectives. Whom the end cuts off is judged by what it had:
        when its first token had come, as if it had asked for no more; else as missed if that was late already; else not at all.

        The prompts are token ids and `due_s` ascends. The engine is idle afterwards.
        """
        begin_s, todo = self._clock.now(), deque(planned)
        while (now_s := self._clock.now()) < begin_s + seconds and self._misses <= most_misses:
            while todo and begin_s + todo[0].due_s <= now_s:
                self._submit(todo.popleft(), begin_s)
            if not todo and not any(self._waits(self._lines[name], now_s) for name in self._live):
                break
            if not self._engine.step():
                next_s = begin_s + min(todo[0].due_s if todo else seconds, seconds)
                self._clock.sleep(min(max(next_s - self._clock.now(), 0.0), _REST_S))
        return self._end(len(todo), self._misses > most_misses)

    def _waits(self, line: Lifeline, now_s: float) -> bool:
        """Whether its first token may still come in time."""
        limit_s = self._slo.ttft_limit_s(line.prompt_tokens)
        return not line.token_s and (limit_s is None or now_s - line.due_s <= limit_s)

    def _submit(self, planned: PlannedRequest, begin_s: float) -> None:
        ask, name = planned.ask, str(planned.index)
        assert not isinstance(ask.prompt, str)
        tokens = ask.output_tokens or 1
        line = Lifeline(begin_s + planned.due_s, self._clock.now(), prompt_tokens=len(ask.prompt), asked_tokens=tokens)
        self._lines[name] = line
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        self._engine.submit(NewRequest(name, ask.prompt, params))
        self._live.add(name)

    def _publish(self, sink: str, events: list[TokenEvent]) -> None:
        now_s = self._clock.now()
        for event in events:
            if event.request_id not in self._live:
                continue  # cut off
            line = self._lines[event.request_id]
            if event.token is not None:
                line.tokens_arrived(now_s)
            if event.finish is FinishReason.ERROR:
                line.fail(now_s, event.error or "")
            elif event.finish is not None:
                line.complete(now_s, event.finish.value)
            if event.finish is not None:
                self._live.discard(event.request_id)
                self._misses += self._slo.verdict(line) is not Verdict.GOOD

    def _end(self, unsent: int, missed: bool) -> Offered:
        now_s, cut = self._clock.now(), list(self._live)
        self._live.clear()
        self._engine.abort(cut)
        while self._engine.step():
            pass
        self._engine.check_integrity()
        undecided = {name for name in cut if self._waits(self._lines[name], now_s)}
        for name in cut:
            line = self._lines[name]
            if line.token_s:
                line.asked_tokens = len(line.token_s)
                line.complete(now_s, "cut")
        judged = [line for name, line in self._lines.items() if name not in undecided]
        return Offered(judged, len(undecided) + unsent, missed)
