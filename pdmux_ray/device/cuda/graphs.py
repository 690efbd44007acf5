"""The decode graphs: one for each level (a stream, with its SMs) and batch bucket, captured at the start.

A kernel in a graph runs in the context that it was captured in, whatever stream the graph is replayed on. So each graph is
captured on its level's stream, and then its nodes are asked: a side stream inside a library would run on SMs of the other lane.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial

from pdmux_ray.device.cuda.lane import Bucket, DecodeLane
from pdmux_ray.device.cuda.streams import Graph, Stream, Streams
from pdmux_ray.errors import ConfigError, PdmuxError
from pdmux_ray.model.decoder import Decoder

logger = logging.getLogger(__name__)

_FIRST = (1, 2, 4)  # bucket sizes below a stride of 8
_STRIDE = 8
_PROGRESS = 16  # graphs between two lines of the log


class GraphContextError(PdmuxError):
    """Kernels of a captured graph would run outside their partition."""


def bucket_sizes(max_batch: int, asked: Sequence[int] | None = None) -> tuple[int, ...]:
    """1, 2, 4, then multiples of 8, from 64 on of a quarter of the power of two below; the last is `max_batch`.

    A batch runs in the smallest bucket that holds it. `asked`: other sizes. Raises ConfigError when the largest of those is
    smaller than `max_batch`.
    """
    if asked is not None:
        sizes = sorted({size for size in asked if size < max_batch})
        if max(asked) < max_batch:
            raise ConfigError(
                f"engine.cuda.decode_buckets ends at {max(asked)}, but engine.max_batch is {max_batch}: add a bucket as large"
            )
        return (*sizes, max_batch)
    sizes, size = [size for size in _FIRST if size < max_batch], _STRIDE
    while size < max_batch:
        sizes.append(size)
        size += max(_STRIDE, 2 ** (size.bit_length() - 1) // 4)
    return (*sizes, max_batch)


def warm_up(stream: Stream, lane: DecodeLane, decoder: Decoder, bucket: Bucket) -> None:
    """One step of rows that are nobody's, not as a graph: compiles kernels, and makes the buffers and workspaces of the stream.
    Inputs are zeros: it writes to page 0, so it is for the time before the first request."""
    stream.run(bucket.receive)
    stream.run(partial(lane.step, decoder, bucket))


def capture(streams: Streams, stream: Stream, lane: DecodeLane, decoder: Decoder, bucket: Bucket) -> tuple[Graph, set[int]]:
    """The step of a level and bucket as a graph, and the contexts of its kernels."""
    warm_up(stream, lane, decoder, bucket)
    stream.record().wait()
    graph = stream.capture(partial(lane.step, decoder, bucket))
    return graph, streams.node_contexts(graph)


class DecodeGraphs:
    """All of them. `unknown`: of how many the driver does not say in which context every kernel runs."""

    def __init__(self, streams: Streams, lane: DecodeLane, decoders: Mapping[Stream, Decoder], strict: bool) -> None:
        """Captures on each stream of `decoders`. Raises GraphContextError when a kernel escapes the stream's partition; not
        `strict`: that is a warning."""
        self._graphs: dict[tuple[Stream, int], Graph] = {}
        self.unknown, escapes = 0, list[GraphContextError]()
        count = len(decoders) * len(lane.buckets)
        for stream, decoder in decoders.items():
            for bucket in reversed(lane.buckets.values()):  # the largest first: the others' memory fits into its
                self._graphs[stream, bucket.size], found = capture(streams, stream, lane, decoder, bucket)
                wanted = streams.context(stream)
                self.unknown += found != {wanted}
                if strangers := found - {wanted, 0}:
                    escapes.append(_escape(stream, bucket, len(strangers)))
                    if strict:
                        raise escapes[0]
                if len(self._graphs) % _PROGRESS == 0 or len(self._graphs) == count:
                    logger.info("captured %d of %d decode graphs", len(self._graphs), count)
        if escapes:
            logger.warning("the first of %d: %s", len(escapes), escapes[0])
        elif self.unknown:
            logger.warning(
                "of %d of %d decode graphs the driver does not name the context of every kernel: that these keep to their SMs "
                "is not verified here; `pdmux gpu-check` measures it",
                self.unknown,
                count,
            )

    def of(self, stream: Stream, bucket: Bucket) -> Graph:
        return self._graphs[stream, bucket.size]

    def close(self) -> None:
        """Frees them; none may be running."""
        self._graphs = {}


def _escape(stream: Stream, bucket: Bucket, strangers: int) -> GraphContextError:
    return GraphContextError(
        f"the decode graph of {stream.units} SMs, batch {bucket.size}, has kernels in {strangers} other contexts: "
        "they would run on SMs of the other lane. A library launched them on a stream of its own: install the versions in "
        "deploy/requirements/gpu.txt, or report this with those of torch, triton and the driver."
    )
