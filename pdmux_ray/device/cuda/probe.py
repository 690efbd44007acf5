"""What the SMs of a lane give, measured on the lane's own stream: bytes and operations a second."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch

from pdmux_ray.device.cuda.streams import Stream, Streams, Work

WARM_UP = 3  # times of whatever is measured that do not count
TIMES = 10
COPY_BYTES = 2**29  # of each of two buffers: many times the L2 cache
GEMM = 4096  # rows and columns of square matrices

_LEAST_S = 1e-9


def probe(
    streams: Streams, levels: Sequence[int], dtype: torch.dtype, copy_bytes: int = COPY_BYTES, gemm: int = GEMM
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(bytes read and written, floating point operations) a second, aligned with `levels`: SMs of the device, or of a lane of
    one of its splits. Raises ValueError for another number."""
    of = {streams.units: streams.whole}
    for split in streams.splits:
        of |= {split.prefill_units: streams.prefill(split), split.decode_units: streams.decode(split)}
    if unknown := [level for level in levels if level not in of]:
        raise ValueError(f"no lane has {', '.join(map(str, unknown))} SMs; there are {', '.join(map(str, sorted(of)))}")
    return (
        tuple(copy_rate(streams, of[level], copy_bytes) for level in levels),
        tuple(flop_rate(streams, of[level], gemm, dtype) for level in levels),
    )


def copy_rate(streams: Streams, stream: Stream, nbytes: int, times: int = TIMES, *, by_driver: bool = False) -> float:
    """Bytes read and written a second, by a kernel on the stream's SMs; or by the driver's own copy, which may use engines that
    are none of them."""
    count = nbytes // 4
    source, target = (torch.ones(count, dtype=torch.float32, device=streams.device) for _ in range(2))

    def work() -> None:
        if by_driver:
            target.copy_(source)
        else:
            torch.add(source, 1.0, out=target)

    return 8 * count / median(times_s(streams, stream, work, times))


def flop_rate(streams: Streams, stream: Stream, size: int, dtype: torch.dtype, times: int = TIMES) -> float:
    """Operations a second of a product of random square matrices: of zeros it would be faster, as they take less power."""
    a, b, out = (torch.randn(size, size, device=streams.device).to(dtype) for _ in range(3))

    def work() -> None:
        torch.mm(a, b, out=out)

    return 2.0 * size**3 / median(times_s(streams, stream, work, times))


def times_s(streams: Streams, stream: Stream, work: Work, count: int) -> list[float]:
    """Of `work` on the device, between events."""
    streams.settle()
    for _ in range(WARM_UP):
        stream.run(work)
    found = []
    for _ in range(count):
        begin = stream.record()
        stream.run(work)
        end = stream.record()
        end.wait()
        found.append(max(end.seconds_since(begin), _LEAST_S))
    return found
