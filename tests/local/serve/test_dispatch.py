"""Instances that go away while they serve an answer: its client sees the answer that it would have seen."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmux_ray.clock import VirtualClock
from pdmux_ray.engine.engine import Engine
from pdmux_ray.engine.limits import EngineLimits
from pdmux_ray.errors import ContextLengthError, DeadlineError, InstanceUnavailableError, PdmuxError
from pdmux_ray.policy.decisions import RouteChoice, RouteReason
from pdmux_ray.serve import dispatch, wire
from pdmux_ray.serve.answer import Answer
from pdmux_ray.serve.dispatch import MAX_LOSSES, Dispatch
from pdmux_ray.serve.generation import Choice, UsageAsked
from pdmux_ray.serve.mailbox import Mailbox
from pdmux_ray.serve.replies import ChatReply
from pdmux_ray.types import NewRequest, SamplingParams
from tests.unit.engine.world import PAGE, StrictRunner, limits
from tests.unit.serve.fakes import Letters, LetterText, metrics

VOCAB = 100  # "!", at which a text stops, and "?", which it holds back, are among its letters
BOUNDS: EngineLimits = limits(vocab_size=VOCAB, context_length=200)
PROMPT = (1, 2, 3)
GONE = InstanceUnavailableError("The instance that served this request went away. Send it again.")
T = TypeVar("T")


class Instance:
    """An engine on the fake device at the end of a line. `way` is how it goes when it has made `lives` tokens (None: never):

    line: at once, with what it has just made; closed: its requests end with an error; gives up: they end, and it lives on
    """

    def __init__(self, name: str, lives: int | None = None, way: str = "line", refusal: PdmuxError | None = None) -> None:
        self.instance_id = name
        self.refusal = refusal
        self.submissions = 0  # accepted ones
        self.submitted: list[NewRequest] = []
        self.aborted: list[str] = []
        self.hangs = False
        self._lives = lives
        self._way = way
        self._mailboxes: dict[str, tuple[Mailbox, int]] = {}
        self._clock = VirtualClock()
        self.engine = Engine(
            StrictRunner(256, PAGE, 0.01, 0.001, self._clock, vocab_size=VOCAB), BOUNDS, self._publish, self._clock
        )

    async def submit(self, requests: Mapping[int, NewRequest], mailbox: Mailbox, left_s: float) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        if self.refusal is not None:
            raise self.refusal
        self.submissions += 1
        submission = json.loads(json.dumps(wire.pack_submission(list(requests.values()), left_s)))
        self._mailboxes |= {new.request_id: (mailbox, index) for index, new in requests.items()}
        for new in wire.unpack_submission(submission, "s", self._clock.now(), 60.0):
            self.engine.submit(new)
            self.submitted.append(new)

    def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            self._mailboxes.pop(request_id, None)
        self.engine.abort(request_ids)

    def go(self) -> None:
        """The line is down."""
        self.refusal = GONE
        for mailbox, _ in self._mailboxes.values():
            mailbox.fail(GONE)
        self._mailboxes.clear()

    def _publish(self, sink: str, events: Sequence[Any]) -> None:
        for event in events:
            if self._lives == 0 and event.token is not None and self._way == "line":
                self.go()
                return
            self._lives = self._lives - 1 if self._lives and event.token is not None else self._lives
            target = self._mailboxes.get(event.request_id)
            if target is not None:
                target[0].put(target[1], json.loads(json.dumps(wire.pack_event(event))))

    def step(self) -> None:
        if self._lives == 0 and self._way == "closed":
            self.refusal = GONE
            self.engine.close()
        elif self._lives == 0 and self._way == "gives up":
            self._lives = None
            self.engine.abort([new.request_id for new in self.submitted])
        self.engine.step()

    def close(self) -> None:
        """Nothing may be left behind."""
        self.engine.step()
        self.engine.check_integrity()
        load = self.engine.load()
        assert (load.running, load.waiting) == (0, 0) or self.refusal is GONE
        self.engine.close()


class Fleet:
    """The instances, in the order in which they are chosen."""

    def __init__(self, *instances: Instance) -> None:
        self.instances = instances
        self.asked: list[Sequence[Sequence[int]]] = []

    def choose(self, prompts: Sequence[Sequence[int]], avoid: Collection[str] = ()) -> tuple[Instance, RouteChoice]:
        self.asked.append(prompts)
        for instance in self.instances:
            if instance.instance_id not in avoid:
                return instance, RouteChoice(instance.instance_id, RouteReason.ONLY_ONE)
        raise InstanceUnavailableError("No instance can take requests now.")

    async def during(self, doing: Awaitable[T]) -> T:
        """Lets the engines run until it is done."""
        task = asyncio.ensure_future(doing)
        async with asyncio.timeout(60):
            while not task.done():
                for instance in self.instances:
                    instance.step()
                await asyncio.sleep(0)
        for instance in self.instances:
            instance.close()
        return task.result()


class Client:
    """An answer of one choice for each of `params`, first at the first instance."""

    def __init__(self, fleet: Fleet, params: Sequence[SamplingParams], timeout_s: float = 60.0) -> None:
        self.fleet = fleet
        self.metrics = metrics()
        choices = [Choice(index, LetterText(), len(PROMPT), first_of_prompt=index == 0) for index in range(len(params))]
        requests = [NewRequest(f"r{index}", PROMPT, each) for index, each in enumerate(params)]
        sent = Dispatch(choices, requests, fleet.instances[0], fleet, self.metrics)  # type: ignore[arg-type]
        self.answer = Answer("chat", choices, sent, arrived_s=time.monotonic(), timeout_s=timeout_s, metrics=self.metrics)

    async def begin(self) -> list[Any]:
        await self.answer.start()
        return await self.answer.next()

    async def stream(self) -> list[Any]:
        """Every event, as JSON or the closing word."""
        reply = ChatReply("id", "m", 1, stream=True, usage_asked=True, names=Letters())
        raw = b"".join([chunk async for chunk in self.answer.chunks(reply, await self.begin(), UsageAsked.ALL)])
        return [event if event == "[DONE]" else json.loads(event) for event in (e[6:] for e in raw.decode().split("\n\n") if e)]

    def resumed(self, outcome: str) -> float:
        shown = self.metrics.exposition().decode()
        found = [line for line in shown.splitlines() if line.startswith("pdmux_resumed_requests_total{") and outcome in line]
        return float(found[0].split()[-1]) if found else 0.0


def by_choice(events: Sequence[Any]) -> dict[int | str, list[Any]]:
    """The events of each choice, in order, and those of none: what a client can see but for the turns between choices."""
    found: dict[int | str, list[Any]] = {}
    for event in events:
        found.setdefault(event["choices"][0]["index"] if event != "[DONE]" and event.get("choices") else "all", []).append(
            event
        )
    return found


PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(5, 14),
    min_tokens=st.integers(0, 5),
    seed=st.integers(0, 50),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=2).map(tuple),
    logprobs=st.sampled_from([None, 0, 2]),
)
LOSSES = st.lists(st.tuples(st.integers(1, 12), st.sampled_from(["line", "closed", "gives up"])), min_size=1, max_size=3)


@given(params=st.lists(PARAMS, min_size=1, max_size=2), losses=LOSSES)
def test_a_stream_is_the_one_of_an_instance_that_stays(params: list[SamplingParams], losses: list[tuple[int, str]]) -> None:
    async def both() -> None:
        alone = Client(Fleet(Instance("stays")), params)
        expected = await alone.fleet.during(alone.stream())
        lost = [Instance(f"i{number}", lives, way) for number, (lives, way) in enumerate(losses)]
        client = Client(Fleet(*lost, Instance("last")), params)
        events = await client.fleet.during(client.stream())
        assert by_choice(events) == by_choice(expected)
        assert client.resumed("resumed") == sum(instance.submissions for instance in client.fleet.instances) - 1

    asyncio.run(both())


GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


async def test_only_what_is_unfinished_moves_with_its_tokens_under_another_name_and_no_other_time_than_is_left() -> None:
    short = SamplingParams(max_tokens=1, ignore_eos=True)
    first, second = Instance("first", lives=5), Instance("second")
    client = Client(Fleet(first, second), [short, GREEDY], timeout_s=60.0)
    await client.fleet.during(client.stream())
    (moved,) = second.submitted
    assert (moved.request_id, moved.prompt, moved.params) == ("r1.1", PROMPT, GREEDY)
    tokens = client.answer.choices[1].tokens
    assert moved.generated == tuple(tokens[:4])  # the fifth of five tokens was the first choice's
    assert client.fleet.asked == [[(*PROMPT, *tokens[:4])]]
    assert moved.deadline_s is not None
    assert 50.0 < moved.deadline_s < 60.0
    assert [new.generated for new in first.submitted] == [None, None]


async def test_an_instance_that_refuses_at_once_is_passed_over() -> None:
    client = Client(Fleet(Instance("leaves", refusal=GONE), Instance("stays")), [GREEDY])
    events = await client.fleet.during(client.stream())
    assert events[-1] == "[DONE]"
    assert client.fleet.instances[1].submitted[0].generated == ()


async def test_when_no_instance_is_left_the_client_is_told_how_the_last_one_was_lost() -> None:
    client = Client(Fleet(Instance("only", lives=3)), [GREEDY])
    events = await client.fleet.during(client.stream())
    assert events[-1]["error"]["message"] == str(GONE)
    assert "[DONE]" not in events
    assert client.resumed("no_instance") == 1


async def test_an_answer_that_instances_die_of_does_not_reach_them_all() -> None:
    killed = [Instance(f"i{number}", lives=0) for number in range(MAX_LOSSES + 1)]
    client = Client(Fleet(*killed), [GREEDY])
    with pytest.raises(InstanceUnavailableError, match="went away"):
        await client.fleet.during(client.begin())
    client.answer.close()
    assert [bool(instance.submitted) for instance in killed] == [True] * MAX_LOSSES + [False]
    assert client.resumed("tried_enough") == 1


async def test_an_answer_that_gets_on_may_lose_any_number_of_instances() -> None:
    lost = [Instance(f"i{number}", lives=1) for number in range(3 * MAX_LOSSES)]
    client = Client(Fleet(*lost, Instance("last")), [GREEDY])
    assert (await client.fleet.during(client.stream()))[-1] == "[DONE]"
    assert client.resumed("resumed") == len(lost)


async def test_an_answer_that_another_instance_refuses_fails_with_its_reason() -> None:
    client = Client(Fleet(Instance("first", lives=2), Instance("small", refusal=ContextLengthError(100, 50))), [GREEDY])
    events = await client.fleet.during(client.stream())
    assert "maximum context length is 50" in events[-1]["error"]["message"]
    assert client.resumed("refused") == 1


async def test_an_instance_that_does_not_answer_costs_no_more_than_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "PATIENCE_S", 0.01)
    first, second = Instance("first", lives=2), Instance("hangs")
    second.hangs = True
    client = Client(Fleet(first, second), [GREEDY], timeout_s=0.05)

    async def stalls() -> None:
        await client.begin()
        while True:
            await client.answer.next()

    with pytest.raises(DeadlineError, match=r"within 0\.05 s"):
        await client.fleet.during(stalls())
    client.answer.close()
    assert client.resumed("refused") == 1


async def test_a_client_that_leaves_after_a_move_ends_its_requests_where_they_are() -> None:
    first, second = Instance("first", lives=2), Instance("second")
    client = Client(Fleet(first, second), [GREEDY])

    async def leaves_early() -> None:
        await client.begin()
        while not second.submitted:
            await client.answer.next()
        await client.answer.next()
        client.answer.close()

    await client.fleet.during(leaves_early())
    assert second.aborted == ["r0.1"]


async def test_what_a_lost_instance_still_says_is_not_heard() -> None:
    first, second = Instance("first", lives=2, way="gives up"), Instance("second")
    client = Client(Fleet(first, second), [GREEDY])
    kept: list[Mailbox] = []
    submit: Callable[..., Awaitable[None]] = first.submit

    async def noting(requests: Mapping[int, NewRequest], mailbox: Mailbox, left_s: float) -> None:
        kept.append(mailbox)
        await submit(requests, mailbox, left_s)

    first.submit = noting  # type: ignore[method-assign]

    async def haunted() -> str:
        text = "".join(update.text for update in await client.begin())
        while not client.answer.finished:
            if second.submitted:
                kept[0].put(0, ("r0", ord("X")))
            text += "".join(update.text for update in await client.answer.next())
        client.answer.close()
        return text

    assert "X" not in await client.fleet.during(haunted())
    assert client.answer.choices[0].completion_tokens == GREEDY.max_tokens
