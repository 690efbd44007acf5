"""Offline generation: one engine in this process, no Ray, no HTTP."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from pdmux_ray.config import AppConfig
from pdmux_ray.device.base import build_runner
from pdmux_ray.engine.engine import Engine
from pdmux_ray.engine.limits import resolve_limits
from pdmux_ray.errors import PdmuxError
from pdmux_ray.latency.loading import load_costs
from pdmux_ray.model.source import resolve
from pdmux_ray.text.stream import TextStream
from pdmux_ray.text.tokenizer import Tokenizer
from pdmux_ray.types import FinishReason, NewRequest, SamplingParams, TokenEvent, TokenLogprobs

OnText = Callable[[int, str], None]  # (index of the prompt, new text)

_LOOK_UP_S = 1.0  # how often a silent engine is asked whether it still works


@dataclass(slots=True)
class Completion:
    """One prompt's answer. `token_ids` ends with the token that ended it, which has no text when it is an end token."""

    prompt_tokens: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None  # set when generate() returns
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # when asked for; of token_ids without an ending end token


class Generator:
    """A model that answers prompts. A context manager; one caller at a time.

    Of `config`, what concerns gateways and replica counts is not used. Raises ConfigError, UnsupportedModelError, WeightsError.
    """

    def __init__(self, config: AppConfig) -> None:
        directory = resolve(config.model, weights=config.engine.reads_weights)
        runner = build_runner(directory, config.engine)  # first: it sets up the process before torch is imported
        self.tokenizer = Tokenizer.load(directory)
        limits = resolve_limits(config.engine, self.tokenizer.facts, runner)
        profile = config.engine.multiplex.profile
        costs = load_costs(Path(profile).expanduser(), directory, runner) if profile and limits.has_lanes else None
        self._events: queue.SimpleQueue[list[TokenEvent]] = queue.SimpleQueue()
        self._engine = Engine(runner, limits, lambda _, events: self._events.put(events), costs=costs)
        self._engine.start()
        self._calls = 0

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the engine. Safe to call twice."""
        self._engine.close()

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams,
        stop: tuple[str, ...] = (),
        on_text: OnText | None = None,
    ) -> list[Completion]:
        """Answers every prompt (text, or token ids), as many at once as the engine takes; answers are in the prompts' order.

        `on_text` is called in this thread as text comes. Raises RequestError when the engine refuses a prompt, PdmuxError when
        it fails; either ends the whole call.
        """
        ids = [tuple(self.tokenizer.encode(p) if isinstance(p, str) else p) for p in prompts]
        self._calls += 1
        answers = [_Answer(i, TextStream(self.tokenizer, stop, params.min_tokens), len(p), on_text) for i, p in enumerate(ids)]
        requests = [NewRequest(f"{self._calls}-{i}", prompt, params) for i, prompt in enumerate(ids)]
        self._run(deque(requests), dict(zip((r.request_id for r in requests), answers, strict=True)))
        return [answer.completion for answer in answers]

    def _run(self, to_submit: deque[NewRequest], answers: dict[str, _Answer]) -> None:
        """Until every answer has its last event; never more requests in the engine than its queue takes."""
        live: set[str] = set()
        try:
            while to_submit or live:
                while to_submit and len(live) < self._engine.limits.max_waiting:
                    self._engine.submit(to_submit[0])
                    live.add(to_submit.popleft().request_id)
                for event in self._next_events():
                    answer = answers.get(event.request_id)
                    if answer is None:
                        continue  # of an earlier call that was interrupted
                    answer.take(event)
                    if event.finish is not None:
                        live.remove(event.request_id)
                    elif answer.stream.stopped:
                        self._engine.abort([event.request_id])
        finally:
            self._engine.abort(live)

    def _next_events(self) -> Iterable[TokenEvent]:
        while True:
            try:
                return self._events.get(timeout=_LOOK_UP_S)
            except queue.Empty:
                problem = self._engine.problem()
                if problem is not None:
                    raise PdmuxError(problem) from None


class _Answer:
    """One completion in the making."""

    def __init__(self, index: int, stream: TextStream, prompt_tokens: int, on_text: OnText | None) -> None:
        self.stream = stream
        self.completion = Completion(prompt_tokens)
        self._index = index
        self._on_text = on_text

    def take(self, event: TokenEvent) -> None:
        """Raises PdmuxError when the engine gave the request up."""
        if event.finish is FinishReason.ERROR:
            raise PdmuxError(event.error or "the engine gave the request up")
        if event.cached_tokens is not None:
            self.completion.cached_tokens = event.cached_tokens
        if event.token is not None and not self.stream.stopped:
            self.completion.token_ids.append(event.token)
            if event.finish is not FinishReason.STOP:
                self._show(self.stream.push(event.token))
                if event.logprobs is not None:
                    self.completion.logprobs.append(event.logprobs)
        if event.finish is not None:
            self._show(self.stream.finish())
            self.completion.finish = FinishReason.STOP if self.stream.stopped else event.finish

    def _show(self, text: str) -> None:
        self.completion.text += text
        if text and self._on_text is not None:
            self._on_text(self._index, text)
