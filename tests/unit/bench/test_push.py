from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from kv_transfer.api import HandoffId, Landed, PortEvent, Wanted
from kv_transfer.layout import KVLayout
from pdmux_ray.bench.push import MarkedPort
from pdmux_ray.engine.handoffs import NoPort

LAYOUT = KVLayout(layers=4, pages=32, kv_heads=1, page_size=4, head_dim=8, dtype_bytes=2)
HANDOFF = HandoffId(1, 0)
TOKENS = 11
PAGES = (7, 3, 5)
Computed = tuple[range, range, list[int]]
ALL: Computed = (range(4), range(TOKENS), list(PAGES))
LAYERS: list[Computed] = [(range(1), range(TOKENS), [7, 3, 5]), (range(1, 4), range(TOKENS), [7, 3, 5])]
CHUNKS: list[Computed] = [(range(4), range(6), [7, 3]), (range(4), range(6, TOKENS), [3, 5])]


class Told(NoPort):
    """Has these events, and notes what has been computed."""

    def __init__(self, events: Sequence[PortEvent]) -> None:
        self.computations: list[Computed] = []
        self._events = events

    def computed(self, handoff: HandoffId, layers: range, tokens: range, pages: Sequence[int]) -> None:
        self.computations.append((layers, tokens, list(pages)))

    def poll(self) -> Sequence[PortEvent]:
        return self._events


def told_of(blocks: list[Computed], whole: bool) -> tuple[MarkedPort, list[list[Computed]]]:
    """The port, and what the one behind it had been told after each block."""
    told = Told([Wanted(HANDOFF, "d", (1,) * TOKENS, 0, math.inf)])
    port = MarkedPort(told, LAYOUT)
    port.whole = whole
    port.poll()
    after = []
    for block in blocks:
        port.computed(HANDOFF, *block)
        after.append(list(told.computations))
    return port, after


@pytest.mark.parametrize("blocks", [LAYERS, CHUNKS], ids=["layers", "chunks"])
def test_blocks_pass_as_they_are_and_the_last_one_is_timed(blocks: list[Computed]) -> None:
    port, after = told_of(blocks, whole=False)
    assert after == [blocks[:1], blocks]
    assert (port.blocks, port.pages) == (2, 3)
    assert not math.isnan(port.computed_s)


@pytest.mark.parametrize("blocks", [LAYERS, CHUNKS], ids=["layers", "chunks"])
def test_a_whole_request_is_held_back_until_its_last_block_and_then_told_at_once(blocks: list[Computed]) -> None:
    port, after = told_of(blocks, whole=True)
    assert after == [[], [ALL]]
    assert (port.blocks, port.pages) == (2, 3)


def test_an_unfinished_handoff_has_no_time_of_its_last_block() -> None:
    port, _ = told_of(LAYERS[:1], whole=False)
    assert math.isnan(port.computed_s)


def test_the_next_handoff_begins_anew() -> None:
    port, _ = told_of(CHUNKS, whole=True)
    port.poll()
    assert (port.blocks, port.pages) == (0, 0)


def test_a_landing_is_timed() -> None:
    port = MarkedPort(Told([Landed(HANDOFF, range(TOKENS))]), LAYOUT)
    assert math.isnan(port.landed_s)
    port.poll()
    assert not math.isnan(port.landed_s)
