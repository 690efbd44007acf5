"""Two engines whose ports meet in a `Link`: a fake of everything between them, which the test moves by hand.

The KV of a prompt is copied when it lands, so pages that P gives away too early, or that D takes back too early, give other
tokens. Until a handoff is safe, `scribble` may write garbage into its pages, as a peer may that was given up too early.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kv_transfer.api import Fetch, HandoffId, KvPort, Landed, LossReason, Lost, PortEvent, Safe, Sent, Unwanted, Wanted
from pdmux_ray.engine.engine import Engine
from pdmux_ray.engine.fake_runner import FakeRunner
from pdmux_ray.types import NewRequest

from .world import PAGE, Log, request

GARBAGE = 12345


@dataclass
class Push:
    """One handoff between its fetch and its last event."""

    fetch: Fetch
    wanted: bool = False  # P has been told
    answered: bool = False  # Landed or Lost has been told
    safe: bool = False  # D may use the pages for something else
    sent: bool = False
    dropped: bool = False
    failed: bool = False
    layers: list[range] = field(default_factory=list)  # of P's reports, in order
    reports: list[tuple[range, range]] = field(default_factory=list)  # (layers, tokens)
    done: dict[int, int] = field(
        default_factory=dict
    )  # layer -> tokens of the prompt whose KV was reported, from 0 or start on
    slots: dict[int, int] = field(default_factory=dict)  # position -> P's slot
    generations: dict[int, int] = field(default_factory=dict)  # of P's pages, when they were reported

    @property
    def over(self) -> bool:
        return self.safe and (self.sent or not self.wanted)


class LinkPort(KvPort):
    """One end: `peers` names the others."""

    def __init__(self, link: Link, epoch: int) -> None:
        self.link = link
        self._epoch = epoch
        self.events: list[PortEvent] = []
        self._wake: Callable[[], None] = lambda: None

    def wake_with(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def tell(self, event: PortEvent) -> None:
        self.events.append(event)
        self._wake()

    @property
    def epoch(self) -> int:
        return self._epoch

    def fetch(self, fetch: Fetch) -> None:
        assert fetch.handoff.decode_epoch == self._epoch
        assert fetch.handoff not in self.link.pushes, "a handoff id was used twice"
        assert fetch.start % PAGE == 0
        assert len(fetch.pages) == -(-len(fetch.tokens) // PAGE) - fetch.start // PAGE > 0
        self.link.pushes[fetch.handoff] = Push(fetch)
        self.link.check(fetch.handoff)

    def drop(self, handoff: HandoffId) -> None:
        self.link.pushes[handoff].dropped = True

    def failed(self, handoff: HandoffId) -> None:
        self.link.pushes[handoff].failed = True

    def computed(self, handoff: HandoffId, layers: range, tokens: range, pages: Sequence[int]) -> None:
        push = self.link.pushes[handoff]
        assert push.wanted
        assert not push.sent
        assert len(pages) == -(-tokens.stop // PAGE) - tokens.start // PAGE
        push.reports.append((layers, tokens))
        for layer in layers:
            assert tokens.start <= push.done.get(layer, push.fetch.start), "a gap in what is reported"
            push.done[layer] = tokens.stop
        first = tokens.start // PAGE
        for position in tokens:
            push.slots[position] = pages[position // PAGE - first] * PAGE + position % PAGE
        generations = self.link.prefill._pool.generations(pages)
        push.generations.update(zip(pages, generations, strict=True))

    def busy(self, seconds: float) -> None: ...

    def poll(self) -> Sequence[PortEvent]:
        events, self.events = self.events, []
        return events


class Link:
    """Between `decode` and `prefill`, which the test sets. Its methods do nothing where they make no sense."""

    decode: Engine
    prefill: Engine

    def __init__(self) -> None:
        self.pushes: dict[HandoffId, Push] = {}
        self.at_decode = LinkPort(self, 1)
        self.at_prefill = LinkPort(self, 2)

    @property
    def alive(self) -> list[HandoffId]:
        return [handoff for handoff, push in self.pushes.items() if not push.over]

    @property
    def newest(self) -> Push:
        return list(self.pushes.values())[-1]

    def want(self, handoff: HandoffId) -> None:
        push = self.pushes[handoff]
        if not push.wanted and not push.answered:
            push.wanted = True
            fetch = push.fetch
            self.at_prefill.tell(Wanted(handoff, "decode", fetch.tokens, fetch.start, fetch.deadline))

    def can_land(self, handoff: HandoffId) -> bool:
        push = self.pushes[handoff]
        done = [push.done.get(layer, 0) for layer in range(_runner(self.prefill).layers)]
        return not (push.answered or push.sent) and min(done) == len(push.fetch.tokens)

    def land(self, handoff: HandoffId) -> None:
        """If P has computed all of it."""
        if not self.can_land(handoff):
            return
        self.check(handoff)
        push = self.pushes[handoff]
        prefill, decode, fetch = _runner(self.prefill), _runner(self.decode), push.fetch
        positions = range(fetch.start, len(fetch.tokens))
        for position in positions:
            page = fetch.pages[(position - fetch.start) // PAGE]
            decode._kv[page * PAGE + position % PAGE] = prefill._kv[push.slots[position]]
        push.answered = push.safe = push.sent = True
        self.at_decode.tell(Landed(handoff, positions))
        self.at_prefill.tell(Sent(handoff, complete=True))

    def lose(self, handoff: HandoffId, reason: LossReason = LossReason.PEER_SILENT, safe: bool = False) -> None:
        push = self.pushes[handoff]
        if push.answered:
            return
        push.answered, push.safe = True, safe
        self.at_decode.tell(Lost(handoff, reason, safe))
        if push.wanted:
            self.at_prefill.tell(Unwanted(handoff, reason))

    def make_safe(self, handoff: HandoffId) -> None:
        push = self.pushes[handoff]
        if push.answered and not push.safe:
            push.safe = True
            self.at_decode.tell(Safe(handoff))

    def release(self, handoff: HandoffId) -> None:
        """P's pages of a lost handoff are read no more."""
        push = self.pushes[handoff]
        if push.answered and push.wanted and not push.sent:
            push.sent = True
            self.at_prefill.tell(Sent(handoff, complete=False))

    def scribble(self, handoff: HandoffId) -> None:
        """A write that comes as late as it may."""
        if not self.pushes[handoff].safe:
            self.check(handoff)
            for page in self.pushes[handoff].fetch.pages:
                for slot in range(page * PAGE, (page + 1) * PAGE):
                    _runner(self.decode)._kv[slot] = GARBAGE

    def check(self, handoff: HandoffId) -> None:
        """Nobody has got pages of a handoff that is alive: D's that are written, P's that are read."""
        push = self.pushes[handoff]
        if not push.safe:
            assert self.decode._pool.generations(push.fetch.pages) == push.fetch.generations
        if push.generations and not push.sent:
            assert self.prefill._pool.generations(push.generations) == tuple(push.generations.values())

    def finish(self, handoff: HandoffId) -> None:
        """Whatever the handoff still lacks."""
        self.land(handoff)
        self.lose(handoff)
        self.make_safe(handoff)
        self.release(handoff)

    def settle(self) -> None:
        """Ends every handoff and lets both engines know, also those that are closed."""
        for handoff in self.alive:
            self.finish(handoff)
        for engine in (self.decode, self.prefill):
            engine._handoffs.listen()
            engine._handoffs.act(engine._scheduler, engine._clock.now())

    def carry(self) -> None:
        """A whole transfer of everything that is fetched, as it should go."""
        for handoff in self.alive:
            self.want(handoff)
        while self.prefill.step():
            self.prefill.check_integrity()
        for handoff in self.alive:
            self.land(handoff)


def remote(
    name: str, prompt: Sequence[int], due_s: float = 60.0, peers: Sequence[str] = ("p",), **params: object
) -> NewRequest:
    """A request whose prompt another instance prefills."""
    return replace(request(name, prompt, **params), prefill_peers=tuple(peers), fetch_deadline_s=due_s)


def _runner(engine: Engine) -> FakeRunner:
    assert isinstance(engine._runner, FakeRunner)
    return engine._runner


Pair = Callable[..., tuple[Link, Log]]
