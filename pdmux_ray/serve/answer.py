"""One HTTP request under way: from its engines' events to the chunks or the body of its answer. Knows nothing of ray."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from pdmux_ray.errors import DeadlineError, InstanceUnavailableError, RequestError
from pdmux_ray.metrics.catalog import GatewayMetrics, Outcome
from pdmux_ray.metrics.lifeline import Lifeline
from pdmux_ray.serve import sse
from pdmux_ray.serve.generation import Choice, LogprobEntry, UsageAsked
from pdmux_ray.serve.problems import problem
from pdmux_ray.serve.replies import Reply, counted
from pdmux_ray.serve.wire import Event, unpack_error
from pdmux_ray.types import FinishReason

PATIENCE_S = 1.0
INLINE_LOGPROBS = 2000  # an answer with more of them is written in a thread; these take a few milliseconds
MAX_TAKEN = 256  # events that are handled without a turn for others
MAX_BACKLOG = 10_000  # events of one answer that wait for its client to read

_ABORT = FinishReason.ABORT.value

log = logging.getLogger("ray.serve")


class UnreadAnswerError(RequestError):
    """The client does not read its answer."""


class Update(NamedTuple):
    """What one event means to the client."""

    choice: Choice
    text: str  # may be shown now
    logprobs: Sequence[LogprobEntry]  # of the tokens since the last text
    ended: bool  # by this very event
    tokens: int  # of the choice so far


class Mailbox:
    """Events of one HTTP request, from the link that reads them to the handler that waits for them."""

    def __init__(self, on_overflow: Callable[[], None]) -> None:
        """`on_overflow` is called when the handler has not come for `MAX_BACKLOG` events; the mailbox has failed then."""
        self._events: list[tuple[int, Event]] = []  # (choice index, event)
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._on_overflow = on_overflow

    def put(self, index: int, event: Event) -> None:
        """Once it has failed, nothing is kept any more."""
        if self._error is not None:
            return
        if len(self._events) >= MAX_BACKLOG:
            self._events.clear()
            self.fail(UnreadAnswerError(f"The answer is ended: {MAX_BACKLOG} pieces of it were not read. Read it as it comes."))
            self._on_overflow()
            return
        self._events.append((index, event))
        self._wake()

    def fail(self, error: Exception) -> None:
        """What has arrived is still delivered first."""
        self._error = self._error or error
        self._wake()

    async def take(self) -> list[tuple[int, Event]]:
        """What is new, from one event to `MAX_TAKEN`. Raises what it failed with."""
        while not self._events:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()  # cheaper than an asyncio.Event, once per token
            await self._waiter
        if len(self._events) <= MAX_TAKEN:
            events, self._events = self._events, []
            return events
        await asyncio.sleep(0)  # a client that reads again must not hold up the others
        events = self._events[:MAX_TAKEN]
        del self._events[:MAX_TAKEN]
        return events or await self.take()  # it may have overflowed in between

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class Answer:
    """Owner: the HTTP handler. `close` must be called, however it ends; it frees what still runs.

    The engine ends it at `deadline_s`, and says so. In case no word comes, this end does so `PATIENCE_S` later, and at `cut_s`
    a client that does not read is given up. All on the event loop's clock.
    """

    def __init__(
        self,
        endpoint: str,
        choices: Sequence[Choice],
        *,
        arrived_s: float,
        timeout_s: float,
        metrics: GatewayMetrics,
        leave: Callable[[list[str]], None],
    ) -> None:
        """`leave(request ids)` ends engine requests that this answer needs no longer."""
        self.choices = choices
        self.mailbox = Mailbox(self._end_requests)
        self._endpoint = endpoint
        self._prompt_tokens = sum(choice.prompt_tokens for choice in choices if choice.first_of_prompt)
        self._metrics = metrics
        self._leave = leave
        self._lifelines = [Lifeline(arrived_s) for _ in choices]  # on `time.monotonic`
        self._open = len(choices)  # choices without an end
        self._running: set[str] = set()  # request ids, in the engine's view
        self._error: BaseException | None = None
        self._closed = False
        self._timeout_s = timeout_s
        loop = asyncio.get_running_loop()
        self.deadline_s = loop.time() + timeout_s - (time.monotonic() - arrived_s)
        self.cut_s = self.deadline_s + 2 * PATIENCE_S
        self._timer = loop.call_at(self.deadline_s + PATIENCE_S, self._expire)
        metrics.open_requests.inc()

    @property
    def left_s(self) -> float:
        return self.deadline_s - asyncio.get_running_loop().time()

    @property
    def finished(self) -> bool:
        return not self._open

    async def start(self, submit: Awaitable[None]) -> None:
        """Waits until the engine has the requests. Raises what it refuses them with."""
        try:
            async with asyncio.timeout_at(self.deadline_s + PATIENCE_S):
                await submit
        except TimeoutError:
            self._error = self._too_late()
            raise self._error from None
        except BaseException as error:
            self._error = error
            raise
        self._running.update(choice.request_id for choice in self.choices)
        self._metrics.prompt_tokens.inc(self._prompt_tokens)

    async def next(self) -> list[Update]:
        """Waits for news. Raises PdmuxError when the request cannot be completed."""
        try:
            return self._take(await self.mailbox.take())
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
        self._end_requests()
        metrics = self._metrics
        metrics.open_requests.dec()
        metrics.generated_tokens.inc(sum(choice.completion_tokens for choice in self.choices))
        metrics.cached_tokens.inc(self._cached_tokens())
        ends_s = [end_s for lifeline in self._lifelines if (end_s := lifeline.e2e_s) is not None]
        if self.finished and ends_s:
            metrics.request_s.observe(max(ends_s))
        metrics.ended(self._endpoint, Outcome.COMPLETE if self.finished else outcome(self._error))

    def _cached_tokens(self) -> int:
        return sum(choice.cached_tokens for choice in self.choices if choice.first_of_prompt)

    def _take(self, events: list[tuple[int, Event]]) -> list[Update]:
        now_s = time.monotonic()
        updates = []
        for index, event in events:
            choice = self.choices[index]
            if choice.finish is not None:
                continue
            if len(event) > 2:
                self._check_end(choice, event)
            if event[1] is not None:
                self._observe(index, now_s)
            text = choice.take(event)
            ended = choice.finish is not None
            if ended:
                self._open -= 1
                self._lifelines[index].complete(now_s, str(choice.finish))
            logprobs = choice.take_logprobs() if choice.logprobs and (text or ended) else ()
            updates.append(Update(choice, text, logprobs, ended, choice.completion_tokens))
            if ended and choice.request_id in self._running:  # by a stop string, which the engine does not know of
                self._running.discard(choice.request_id)
                self._leave([choice.request_id])
        return updates

    def _check_end(self, choice: Choice, event: Event) -> None:
        _, _, _, finish, error, _ = event
        if finish is None:
            return
        self._running.discard(choice.request_id)
        if error is not None:
            raise unpack_error(error)
        if finish == _ABORT:
            raise InstanceUnavailableError("The instance gave this request up. Send it again.")

    def _observe(self, index: int, now_s: float) -> None:
        lifeline = self._lifelines[index]
        itl_s = lifeline.tokens_arrived(now_s)
        if itl_s is not None:
            self._metrics.itl_s.observe(itl_s)
        elif len(lifeline.token_s) == 1:
            self._metrics.ttft_s.observe(lifeline.ttft_s or 0.0)  # there is one

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

    def _end_requests(self) -> None:
        self._leave(list(self._running))
        self._running.clear()

    def _expire(self) -> None:
        self.mailbox.fail(self._too_late())

    def _too_late(self) -> DeadlineError:
        return DeadlineError(f"The request was not finished within {self._timeout_s:g} s. Ask for fewer tokens.")


def outcome(error: BaseException | None) -> Outcome:
    """Of a request that did not complete. A cancelled one has lost its client."""
    if isinstance(error, Exception):
        return Outcome.REFUSED if problem(error).status < 500 else Outcome.FAILED
    return Outcome.DISCONNECTED
