"""One HTTP request under way: from its engines' events to the chunks or the body of its answer. Knows nothing of ray."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from pdmux_ray.errors import DeadlineError, InstanceUnavailableError
from pdmux_ray.metrics.gateway_metrics import GatewayMetrics, Outcome, stages
from pdmux_ray.metrics.goodput import Verdict
from pdmux_ray.metrics.lifeline import Ending, Lifeline
from pdmux_ray.metrics.tiers import NO_OBJECTIVES, Tier
from pdmux_ray.serve import sse
from pdmux_ray.serve.generation import Choice, LogprobEntry, UsageAsked
from pdmux_ray.serve.problems import problem
from pdmux_ray.serve.replies import Reply, counted
from pdmux_ray.serve.tracing import UNTRACED, Served, Trace
from pdmux_ray.serve.wire import Event, stages_of, unpack_error
from pdmux_ray.types import FinishReason

PATIENCE_S = 1.0
INLINE_LOGPROBS = 2000  # an answer with more of them is written in a thread; these take a few milliseconds

_ABORT = FinishReason.ABORT.value

log = logging.getLogger("ray.serve")


class Update(NamedTuple):
    """What one event means to the client."""

    choice: Choice
    text: str  # may be shown now
    logprobs: Sequence[LogprobEntry]  # of the tokens since the last text
    ended: bool  # by this very event
    tokens: int  # of the choice so far


class Requests(Protocol):
    """`pdmux_ray.serve.dispatch.Dispatch`, as far as it is needed here: the engine requests of one answer, by choice index."""

    sent_s: float  # when they went to the instance that has them now, on `time.monotonic`

    async def start(self, deadline_s: float) -> None:
        """Waits until an instance has them. Raises what they are refused with; TimeoutError when no word comes."""

    async def take(self) -> list[tuple[int, Event]]:
        """Waits for events, one at least. Raises InstanceUnavailableError when no instance is left; TimeoutError as above."""

    def lost(self, error: InstanceUnavailableError) -> None:
        """The instance has given a request up that is not finished."""

    def fail(self, error: Exception) -> None:
        """`take` raises it after what has arrived."""

    def ended(self, index: int) -> None:
        """The engine has ended this one."""

    def leave(self, index: int) -> None:
        """Ends one that may still run."""

    def leave_all(self) -> None: ...


class Answer:
    """Owner: the HTTP handler. `close` must be called, however it ends; it frees what still runs.

    The engine ends it at `deadline_s`, and says so. In case no word comes, this end does so `PATIENCE_S` later, and at `cut_s`
    a client that does not read is given up. All on the event loop's clock.
    """

    def __init__(
        self,
        endpoint: str,
        choices: Sequence[Choice],
        requests: Requests,
        *,
        arrived_s: float,
        timeout_s: float,
        metrics: GatewayMetrics,
        trace: Trace = UNTRACED,
        tier: Tier = NO_OBJECTIVES,
    ) -> None:
        self.choices = choices
        self._requests = requests
        self._endpoint = endpoint
        self._prompt_tokens = sum(choice.prompt_tokens for choice in choices if choice.first_of_prompt)
        self._metrics = metrics
        self._trace = trace
        self._arrived_s = arrived_s
        self._tier = tier
        self._lifelines = [Lifeline(arrived_s, prompt_tokens=each.prompt_tokens) for each in choices]  # on `time.monotonic`
        self._stages_s: list[Mapping[str, float]] = [{} for _ in choices]  # of the first token, once it is there
        self._open = len(choices)  # choices without an end
        self._error: BaseException | None = None
        self._closed = False
        self._timeout_s = timeout_s
        loop = asyncio.get_running_loop()
        self.deadline_s = loop.time() + timeout_s - (time.monotonic() - arrived_s)
        self.cut_s = self.deadline_s + 2 * PATIENCE_S
        self._timer = loop.call_at(self.deadline_s + PATIENCE_S, self._expire)
        metrics.open_requests.inc()

    @property
    def finished(self) -> bool:
        return not self._open

    async def start(self) -> None:
        """Waits until an engine has the requests. Raises what it refuses them with."""
        try:
            await self._requests.start(self.deadline_s)
        except TimeoutError:
            self._error = self._too_late()
            raise self._error from None
        except BaseException as error:
            self._error = error
            raise
        self._metrics.prompt_tokens.inc(self._prompt_tokens)

    async def next(self) -> list[Update]:
        """Waits for news. Raises PdmuxError when the request cannot be completed."""
        try:
            return self._take(await self._requests.take())
        except TimeoutError:
            self._error = self._too_late()
            raise self._error from None
        except BaseException as error:
            self._error = error
            raise

    async def whole(self, reply: Reply, updates: list[Update]) -> bytes:
        """The answer's body. `updates` are those of the first `next`."""
        texts = [""] * len(self.choices)
        logprobs: list[list[LogprobEntry]] = [[] for _ in self.choices]
        while True:
            for update in updates:
                texts[update.choice.index] += update.text
                logprobs[update.choice.index] += update.logprobs
            if self.finished:
                break
            updates = await self.next()
        write = partial(reply.whole, self.choices, texts, logprobs, self.usage())
        named = sum(1 + len(top) for entries in logprobs for _, _, top, _ in entries)
        return write() if named <= INLINE_LOGPROBS else await asyncio.to_thread(write)

    async def chunks(self, reply: Reply, updates: list[Update], usage_asked: UsageAsked) -> AsyncGenerator[bytes, None]:
        """The answer's events, one chunk per piece of news. An error becomes a last event, without [DONE]. Closes itself."""
        counts = usage_asked is UsageAsked.ALL
        opened: set[int] = set()
        try:
            while True:
                chunk = b"".join(self._events(reply, updates, opened, counts))
                if self.finished:
                    break
                if chunk:
                    yield chunk
                updates = await self.next()
            last = reply.usage(self.usage()) if usage_asked is not UsageAsked.NONE else b""
            yield chunk + last + sse.DONE
        except Exception as error:
            self._error = error
            known = problem(error)
            if known.status == 500:
                log.exception("A stream failed.")
            yield sse.event(known.body())
        finally:
            self.close()

    def usage(self) -> dict[str, Any]:
        """A prompt counts once, however many choices it has."""
        completion_tokens = sum(choice.completion_tokens for choice in self.choices)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self._prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens()},
        }

    def close(self) -> None:
        """Again: does nothing."""
        if self._closed:
            return
        self._closed = True
        self._timer.cancel()
        self._requests.leave_all()
        metrics = self._metrics
        metrics.open_requests.dec()
        metrics.generated_tokens.inc(sum(choice.completion_tokens for choice in self.choices))
        metrics.cached_tokens.inc(self._cached_tokens())
        ends_s = [end_s for lifeline in self._lifelines if (end_s := lifeline.e2e_s) is not None]
        if self.finished and ends_s:
            metrics.request_s.observe(max(ends_s))
        for lifeline in self._lifelines:
            if lifeline.ending is Ending.COMPLETE and lifeline.tpot_s is not None:
                metrics.tpot_s.observe(lifeline.tpot_s)
        how = Outcome.COMPLETE if self.finished else outcome(self._error)
        metrics.ended(self._endpoint, how)
        if (verdict := self._verdict()) is not None:
            metrics.judged(self._tier.name, verdict)
        served = map(Served, self.choices, self._lifelines, self._stages_s)
        self._trace.ended(how, None if self.finished else self._error, served)

    def _cached_tokens(self) -> int:
        return sum(choice.cached_tokens for choice in self.choices if choice.first_of_prompt)

    def _take(self, events: list[tuple[int, Event]]) -> list[Update]:
        now_s = time.monotonic()
        updates = []
        for index, event in events:
            choice = self.choices[index]
            if choice.finish is not None:
                continue
            if len(event) > 2 and self._given_up(index, event):
                continue
            if event[1] is not None:
                self._observe(index, event, now_s)
            text = choice.take(event)
            ended = choice.finish is not None
            if ended:
                self._open -= 1
                self._lifelines[index].complete(now_s, str(choice.finish))
            logprobs = choice.take_logprobs() if choice.logprobs and (text or ended) else ()
            updates.append(Update(choice, text, logprobs, ended, choice.completion_tokens))
            if ended:
                self._requests.leave(index)  # which still runs when a stop string ended it: the engine does not know of those
        return updates

    def _given_up(self, index: int, event: Event) -> bool:
        """Whether the event ends a request that another instance may go on with. Raises what it failed with otherwise."""
        finish, packed = event[3:5]
        if finish is None:
            return False
        self._requests.ended(index)
        error: Exception | None = None
        if packed is not None:
            error = unpack_error(packed)
        elif finish == _ABORT:
            error = InstanceUnavailableError("The instance gave this request up. Send it again.")
        if error is None:
            return False
        if not isinstance(error, InstanceUnavailableError):
            raise error
        self._requests.lost(error)
        return True

    def _observe(self, index: int, event: Event, now_s: float) -> None:
        lifeline = self._lifelines[index]
        itl_s = lifeline.tokens_arrived(now_s)
        if itl_s is not None:
            self._metrics.itl_s.observe(itl_s)
        elif len(lifeline.token_s) == 1:
            told = stages_of(event)
            if told is not None:
                self._stages_s[index] = stages(now_s - self._arrived_s, self._requests.sent_s - self._arrived_s, told)
            self._metrics.first_token(now_s - self._arrived_s, self._stages_s[index])

    def _verdict(self) -> Verdict | None:
        """The worst of all choices. None when the client went away, or had asked for what cannot be."""
        if not self.finished:
            return Verdict.ERROR if is_miss(self._error) else None
        return min((self._tier.slo.verdict(lifeline) for lifeline in self._lifelines), key=list(Verdict).index)

    def _events(self, reply: Reply, updates: list[Update], opened: set[int], counts: bool) -> list[bytes]:
        """`counts`: each event says how many tokens its choice has."""
        lines = []
        for choice, text, logprobs, ended, tokens in updates:
            index = choice.index
            if index not in opened:
                opened.add(index)
                opening = reply.opening(index)
                lines.append(counted(opening, choice.prompt_tokens, 0) if counts else opening)
            if ended:
                line = reply.closing(index, text, logprobs, str(choice.finish))
            elif text:
                line = reply.text_with_logprobs(index, text, logprobs) if logprobs else reply.text(index, text)
            else:
                continue
            lines.append(counted(line, choice.prompt_tokens, tokens) if counts else line)
        return lines

    def _expire(self) -> None:
        self._requests.fail(self._too_late())

    def _too_late(self) -> DeadlineError:
        return DeadlineError(f"The request was not finished within {self._timeout_s:g} s. Ask for fewer tokens.")


def is_miss(error: BaseException | None) -> bool:
    """Whether a request that ended so counts against its SLO."""
    if not isinstance(error, Exception):
        return False
    status = problem(error).status
    return status >= 500 or status == 429


def outcome(error: BaseException | None) -> Outcome:
    """Of a request that did not complete. A cancelled one has lost its client."""
    if isinstance(error, Exception):
        return Outcome.REFUSED if problem(error).status < 500 else Outcome.FAILED
    return Outcome.DISCONNECTED
