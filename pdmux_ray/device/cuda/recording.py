"""Streams without a GPU: CPU tensors, and work that runs as late and in as bad an order as events allow.

Nothing runs when it is put into a stream. When the host waits for an event, what the event depends on runs, after a random
amount of other work that is free to run: so a stream may be far ahead of another one, or far behind, and a value that is read
without having been waited for is not there. With one seed the order is always the same. A stand-in for the streams of a GPU in
tests and benches, for hand-offs between lanes that would go wrong once in a million steps there.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pdmux_ray.device.cuda.green_context import Partition, Partitions
from pdmux_ray.device.cuda.splits import SmResource
from pdmux_ray.device.cuda.streams import Event, Graph, Stream, Work
from pdmux_ray.types import Split

_AHEAD = (0, 0, 1, 2, 5, 1000)  # how many pieces of work may run before what is waited for
_ITEM_S = 1e-3  # what a piece of work takes, by the clock of this device

Forget = Callable[[str, str], bool]


@dataclass(slots=True)
class RecordedGraph:
    """Work that was captured on a stream; `contexts` are those of its nodes."""

    work: Work
    contexts: set[int]


class RecordedEvent:
    """An `Event`. `at_s`: when its stream passed it; None before."""

    def __init__(self, streams: RecordingStreams, stream: RecordingStream) -> None:
        self._streams, self.stream = streams, stream
        self.at_s: float | None = None

    def done(self) -> bool:
        """Others may have done something meanwhile."""
        self._streams.run_some()
        return self.at_s is not None

    def wait(self) -> None:
        self._streams.run_some()
        self._streams.waited[self.stream.name] += self.at_s is None
        self._streams.reach(self)

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, RecordedEvent)
        if self.at_s is None or earlier.at_s is None:
            raise RuntimeError("the time between two events is known only when both are done: wait for them first")
        return self.at_s - earlier.at_s


@dataclass(slots=True, eq=False)
class RecordingStream:
    """A `Stream`. `calls`: what was asked of it, by method."""

    name: str
    units: int
    context: int
    streams: RecordingStreams = field(repr=False)
    calls: Counter[str] = field(default_factory=Counter)
    queue: deque[Work | RecordedEvent | tuple[RecordedEvent]] = field(default_factory=deque)  # a tuple: wait for that event

    def record(self) -> Event:
        self.calls["record"] += 1
        event = RecordedEvent(self.streams, self)
        self.queue.append(event)
        return event

    def wait_for(self, event: Event) -> None:
        assert isinstance(event, RecordedEvent)
        self.calls["wait_for"] += 1
        if not self.streams.forget(self.name, event.stream.name):
            self.queue.append((event,))

    def run(self, work: Work) -> None:
        self.calls["run"] += 1
        self.queue.append(work)

    def capture(self, work: Work) -> Graph:
        self.calls["capture"] += 1
        return RecordedGraph(work, {self.context} | self.streams.stray)

    def replay(self, graph: Graph) -> None:
        assert isinstance(graph, RecordedGraph)
        self.calls["replay"] += 1
        self.queue.append(graph.work)

    def ready(self) -> bool:
        """Whether what is first in it may run now."""
        if not self.queue:
            return False
        first = self.queue[0]
        return not isinstance(first, tuple) or first[0].at_s is not None

    def step(self) -> None:
        """Runs what is first in it; only when `ready`."""
        first = self.queue.popleft()
        if isinstance(first, RecordedEvent):
            first.at_s = self.streams.now_s
        elif not isinstance(first, tuple):
            self.streams.now_s += _ITEM_S
            first()


class RecordingStreams:
    """`Streams` of a device with `units` SMs. One thread at a time.

    `forget(waiting, recorded)`: whether a wait of the stream named first for an event of the other one is left out: what a
    runner without that wait would do. `stray`: contexts that kernels of captured graphs escape to.
    """

    def __init__(
        self,
        units: int = 8,
        splits: Sequence[Split] = (Split(6, 2), Split(4, 4), Split(2, 6)),
        seed: int = 0,
        free_bytes: int = 2**28,
        forget: Forget = lambda waiting, recorded: False,
        stray: set[int] | None = None,
    ) -> None:
        self.name, self.device = "recording", torch.device("cpu")
        partitions = self.partitions = divided(units, splits)
        self.units = units
        self.splits: Sequence[Split] = partitions.splits
        self.forget, self.stray = forget, stray or set()
        self.now_s = 0.0
        self.all: list[RecordingStream] = []
        self.waited: Counter[str] = Counter()  # how often the host had to, by the stream that it waited for
        self._rng, self._free_bytes = random.Random(seed), free_bytes
        whole, pairs = self._new("decode", units), partitions.lanes.values()
        self.whole: Stream = whole
        self.copies: Stream = self._new("copies", units)
        self._decode = {lane: self._new("decode", lane.units) for _, lane in pairs} | {partitions.whole: whole}
        self._prefill = {lane: self._new("prefill", lane.units) for lane in [*(lane for lane, _ in pairs), partitions.whole]}

    def _new(self, lane: str, units: int) -> RecordingStream:
        stream = RecordingStream(f"{lane} {units}", units, len(self.all) + 1, self)
        self.all.append(stream)
        return stream

    def decode(self, split: Split) -> Stream:
        return self._decode[self.partitions.decode(split)]

    def prefill(self, split: Split) -> Stream:
        return self._prefill[self.partitions.prefill(split)]

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeros: what reads too early is wrong, but asks for no absurd amount of work."""
        return torch.zeros(*shape, dtype=dtype)

    def settle(self) -> None:
        pass  # outside of these streams all is done at once

    def free_bytes(self) -> int:
        return self._free_bytes

    def node_contexts(self, graph: Graph) -> set[int]:
        assert isinstance(graph, RecordedGraph)
        return graph.contexts

    def context(self, stream: Stream) -> int:
        assert isinstance(stream, RecordingStream)
        return stream.context

    def calls(self) -> Counter[str]:
        """What was asked of all streams, by method."""
        return sum((stream.calls for stream in self.all), Counter())

    def pending(self) -> int:
        """Pieces of work that have not run."""
        return sum(len(stream.queue) for stream in self.all)

    def run_some(self) -> None:
        """A random number of pieces of work, each of a random stream whose next one is free to run."""
        for _ in range(self._rng.choice(_AHEAD)):
            ready = [stream for stream in self.all if stream.ready()]
            if not ready:
                return
            self._rng.choice(ready).step()

    def reach(self, event: RecordedEvent) -> None:
        """Runs what comes before the event in its stream, and what that waits for, and nothing else."""
        stream = event.stream
        while event.at_s is None:
            first = stream.queue[0]
            if isinstance(first, tuple):
                self.reach(first[0])
            stream.step()


def divided(units: int, splits: Sequence[Split]) -> Partitions:
    """As if a device of so many units had been divided so; every partition has an address of its own."""
    counts = [units, *(count for split in splits for count in (split.prefill_units, split.decode_units))]
    whole, *parts = [Partition(count, count, address, address) for address, count in enumerate(counts, 1)]
    lanes = dict(zip(splits, zip(parts[::2], parts[1::2], strict=True), strict=True))
    return Partitions(SmResource(units, 1, 1), whole, lanes, structured=False)
