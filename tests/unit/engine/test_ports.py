"""The decode side's port: it fails, and it wakes an engine that sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest

from kv_transfer.api import KvTransferError, LossReason, PortEvent
from pdmux_ray.clock import WallClock
from pdmux_ray.engine import loop

from .handoff_world import Link, LinkPort, Pair, remote
from .world import PAGE, VOCAB, StrictRunner, Worlds, expected, request


class DeadPort(LinkPort):
    def poll(self) -> Sequence[PortEvent]:
        raise KvTransferError("no device")


def test_an_engine_whose_port_fails_goes_on_alone_and_says_so(pair: Pair) -> None:
    link, log = pair()
    link.decode.submit(new := remote("r", range(22), peers=("a", "b")))
    link.decode.step()
    link.at_decode.__class__ = DeadPort
    while link.decode.step():
        pass
    assert log.tokens("r") == expected(new, link.decode.limits)[0]
    assert link.decode.load().quarantined_pages == 6
    assert link.decode.problem() == "the KV port has failed: no device"
    link.decode.submit(local := request("local", range(30)))
    while link.decode.step():
        pass
    assert log.tokens("local") == expected(local, link.decode.limits)[0], "what needs no port is served"


class LastWords(LinkPort):
    def poll(self) -> Sequence[PortEvent]:
        if not self.events:
            raise KvTransferError("no device")
        return super().poll()


def test_what_a_port_says_before_it_fails_gives_pages_back(pair: Pair) -> None:
    link, log = pair()
    link.decode.submit(new := remote("r", range(22), peers=("a",)))
    link.decode.step()
    link.at_decode.__class__ = LastWords
    link.lose(link.alive[0], LossReason.PEER_DEAD, safe=True)
    while link.decode.step():
        pass
    assert log.tokens("r") == expected(new, link.decode.limits)[0]
    assert link.decode.load().quarantined_pages == 0
    assert link.decode.problem() == "the KV port has failed: no device"


class CountingClock(WallClock):
    reads = 0

    def now(self) -> float:
        self.reads += 1
        return super().now()


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.001)


def test_an_engine_with_nothing_but_transfers_sleeps_and_wakes_for_their_events(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_DEADLINE_PERIOD_S", 3600.0)  # nothing else wakes it
    link, clock = Link(), CountingClock()
    link.decode, log = worlds(
        runner=lambda c: StrictRunner(64, PAGE, 0.0, 0.0, c, vocab_size=VOCAB), clock=clock, port=link.at_decode
    )
    link.decode.start()
    for token, name in enumerate(("first", "second")):
        link.decode.submit(remote(name, [token] * 22, due_s=clock.now() + 60))
        wait_until(lambda: bool(link.alive))
        wait_until(lambda: not link.decode.load().step_age_s)
        reads = clock.reads
        time.sleep(0.01)
        assert clock.reads - reads <= 1  # by the load above
        link.lose(*link.alive, safe=True)
        log.wait_for_ends([name])


class LatePort(LinkPort):
    """An event comes just after a poll, and the engine is told so."""

    def poll(self) -> Sequence[PortEvent]:
        events = super().poll()
        for handoff in self.link.alive:
            self.link.lose(handoff, safe=True)
        return events


def test_an_event_that_comes_while_the_engine_looks_for_events_is_not_slept_over(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_DEADLINE_PERIOD_S", 3600.0)
    link, clock = Link(), WallClock()
    link.at_decode.__class__ = LatePort
    link.decode, log = worlds(clock=clock, port=link.at_decode)
    link.decode.start()
    link.decode.submit(remote("r", range(22), due_s=clock.now() + 60))
    wait_until(lambda: bool(link.pushes))
    link.decode.abort(["nobody"])  # it looks once more
    log.wait_for_ends(["r"])
