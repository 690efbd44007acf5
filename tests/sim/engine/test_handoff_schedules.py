"""Whole schedules of two instances: whatever becomes of a handoff, every request gets its own tokens and no page is lost."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kv_transfer.api import HandoffId, LossReason
from pdmux_ray.bench.random_planner import RandomPlanner
from pdmux_ray.clock import VirtualClock
from pdmux_ray.engine.engine import Engine
from pdmux_ray.engine.limits import EngineLimits
from pdmux_ray.types import FinishReason, Mode, NewRequest
from tests.examples import tried
from tests.unit.engine.handoff_world import Link, LinkPort, remote
from tests.unit.engine.world import PAGE, VOCAB, Log, StrictRunner, expected, limits, request

MODES = st.sampled_from([Mode.PREFILL_FIRST, Mode.CHUNKED, Mode.AUTO])  # AUTO: of a planner that draws, and preempts
PICK = st.integers(0, 99)
REASONS = st.sampled_from(LossReason)


class TwoInstances(RuleBasedStateMachine):
    """`decode` has requests whose prompt the other one may prefill, and its own; `prefill` has its own, too."""

    @initialize(modes=st.tuples(MODES, MODES), pages=st.tuples(st.integers(10, 30), st.integers(10, 30)), seed=PICK)
    def open(self, modes: tuple[Mode, Mode], pages: tuple[int, int], seed: int) -> None:
        self.clock = VirtualClock()
        self.log = Log()
        self.sent: dict[str, NewRequest] = {}
        self.aborted: set[str] = set()
        self.link = Link()
        self.bounds = limits(context_length=40)
        self.link.decode = self.engine(modes[0], pages[0], self.link.at_decode, seed)
        self.link.prefill = self.engine(modes[1], pages[1], self.link.at_prefill, seed + 1)

    def engine(self, mode: Mode, pages: int, port: LinkPort, seed: int) -> Engine:
        bounds: EngineLimits = limits(mode=mode, context_length=40)
        planner = RandomPlanner(seed, bounds.max_batch, most_steps=4) if mode is Mode.AUTO else None
        device = StrictRunner(pages, PAGE, 0.01, 0.002, self.clock, vocab_size=VOCAB, layers=4, units=4, most_steps=4)
        return Engine(device, bounds, self.log, self.clock, planner=planner, port=port)

    @property
    def engines(self) -> tuple[Engine, Engine]:
        return self.link.decode, self.link.prefill

    def pick(self, number: int) -> HandoffId | None:
        alive = self.link.alive
        return alive[number % len(alive)] if alive else None

    @rule(stem=st.integers(1, 2), length=st.integers(1, 30), max_tokens=st.integers(1, 9), peers=st.integers(0, 2), due=PICK)
    def submit(self, stem: int, length: int, max_tokens: int, peers: int, due: int) -> None:
        name, prompt = f"r{len(self.sent)}", [stem] * (length // 2) + [3] * (length - length // 2)
        new = request(name, prompt, max_tokens=max_tokens)
        if peers:
            new = remote(name, prompt, self.clock.now() + due / 50, ["p"] * peers, max_tokens=max_tokens)
        self.sent[name] = new
        self.link.decode.submit(new)

    @rule(number=PICK, count=st.integers(1, 3), due=PICK)
    def submit_choices_of_a_prompt_that_came_before(self, number: int, count: int, due: int) -> None:
        prompts = [new.prompt for new in self.sent.values()]
        for seed in range(count if prompts else 0):
            name, due_s = f"r{len(self.sent)}", self.clock.now() + due / 50
            self.sent[name] = remote(name, prompts[number % len(prompts)], due_s, max_tokens=4, seed=seed)
            self.link.decode.submit(self.sent[name])

    @rule(stem=st.integers(1, 2), length=st.integers(1, 30))
    def submit_to_the_other(self, stem: int, length: int) -> None:
        name = f"r{len(self.sent)}"
        self.sent[name] = request(name, [stem] * length, max_tokens=6)
        self.link.prefill.submit(self.sent[name])

    @rule(which=st.integers(0, 1), count=st.integers(1, 6))
    def step(self, which: int, count: int) -> None:
        for _ in range(count):
            self.engines[which].step()

    @rule(seconds=st.sampled_from([0.1, 0.3, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.sleep(seconds)

    @rule(number=PICK)
    def abort(self, number: int) -> None:
        if self.sent:
            name = f"r{number % len(self.sent)}"
            self.aborted.add(name)
            for engine in self.engines:
                engine.abort([name])

    @rule(number=PICK)
    def peer_hears(self, number: int) -> None:
        if handoff := self.pick(number):
            self.link.want(handoff)

    @rule(number=PICK)
    def all_goes_well(self, number: int) -> None:
        if handoff := self.pick(number):
            self.link.want(handoff)
            for _ in range(8):
                self.link.prefill.step()
            self.link.land(handoff)

    @rule(number=PICK)
    def land(self, number: int) -> None:
        if handoff := self.pick(number):
            self.link.land(handoff)

    @rule(number=PICK, reason=REASONS, safe=st.booleans())
    def lose(self, number: int, reason: LossReason, safe: bool) -> None:
        if handoff := self.pick(number):
            self.link.lose(handoff, reason, safe)

    @rule(number=PICK)
    def writes_end(self, number: int) -> None:
        if handoff := self.pick(number):
            self.link.make_safe(handoff)

    @rule(number=PICK)
    def reads_end(self, number: int) -> None:
        if handoff := self.pick(number):
            self.link.release(handoff)

    @rule(number=PICK)
    def a_late_write(self, number: int) -> None:
        if handoff := self.pick(number):
            self.link.scribble(handoff)

    @invariant()
    def every_page_has_its_owner(self) -> None:
        if hasattr(self, "link"):
            for engine in self.engines:
                engine.check_integrity()
            for handoff in self.link.alive:
                self.link.check(handoff)

    def teardown(self) -> None:
        """Everything ends, in an order that is drawn by the state, and what is left behind is looked at."""
        if not hasattr(self, "link"):
            return
        order = random.Random(len(self.link.pushes))
        for round_ in range(400):
            busy = [engine.step() for engine in self.engines]
            alive = self.link.alive
            for handoff in alive:
                if not any(busy) or order.random() < 0.1:
                    self.link.want(handoff) if order.random() < 0.5 else self.link.finish(handoff)
            if not any(busy) and not alive and not any(engine.load().waiting for engine in self.engines):
                break
            assert round_ < 399, "it does not end"
        for engine in self.engines:
            engine.step()  # the last events
            load = engine.load()
            assert (load.running, load.leased_pages, load.quarantined_pages, load.free_pages) == (0, 0, 0, load.total_pages)
            engine.check_integrity()
            engine.close()
        self.log.assert_each_ended_at_most_once()
        counters = self.link.decode.counters
        assert counters.kv_used_tokens <= counters.kv_received_tokens
        assert sum(counters.fetches.values()) == len(self.link.pushes)
        for name, new in self.sent.items():
            tokens, finish = expected(new, self.bounds)
            got = self.log.tokens(name)
            if self.log.finish(name) is FinishReason.ABORT:
                assert name in self.aborted
                assert got == tokens[: len(got)]
            else:
                assert (got, self.log.finish(name)) == (tokens, finish)


TwoInstances.TestCase.settings = settings(
    max_examples=tried(25), stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestTwoInstances = TwoInstances.TestCase
