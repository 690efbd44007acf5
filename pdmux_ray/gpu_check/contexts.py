"""Whether the lanes are where they should be: the SMs of each level, and the contexts of what is captured there."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pdmux_ray.device.cuda.cuda_streams import CudaStreams
from pdmux_ray.device.cuda.kernels.rms_norm import rms_norm
from pdmux_ray.device.cuda.streams import Stream, Work
from pdmux_ray.gpu_check.lab import Lab
from pdmux_ray.gpu_check.report import NONE, Row

CTAS_AN_SM = 64  # that look where they are: enough for every SM to get some

_SIZE = 64


def levels(lab: Lab) -> Iterator[Row]:
    """What the driver has told when it made the lanes, and what the hardware says of the SMs on which each lane's kernels ran.
    The double has no hardware to ask."""
    if isinstance(lab.streams, CudaStreams):
        for warning in lab.streams.partitions.warnings:
            yield Row("warning", "", note=warning)
    for name, split in lab.each_split():
        yield Row(f"{name}: bandwidth on the decode SMs", lab.copy_rate(lab.streams.decode(split)) / 1e9, "GB/s")
        if lab.dry:
            continue
        prefill, decode = sms_of(lab.streams.prefill(split)), sms_of(lab.streams.decode(split))
        wrong = abs(len(prefill) - split.prefill_units) + abs(len(decode) - split.decode_units)
        yield NONE.row(f"{name}: SMs seen, minus those stated", wrong, "SMs", note=f"saw {len(prefill)}/{len(decode)}")
        yield NONE.row(f"{name}: SMs that both lanes used", len(prefill & decode), "SMs")


def graphs(lab: Lab) -> Iterator[Row]:
    """A matrix product, a kernel of torch's and one of Triton's, captured on every lane: the context of each is the lane's own,
    and what a replayed kernel says of its SM agrees. Some drivers name no context; then the SMs alone tell."""
    a = torch.randn(_SIZE, _SIZE, device=lab.streams.device).to(lab.dtype)
    out, normed = torch.empty_like(a), torch.empty_like(a)

    def work() -> None:
        torch.mm(a, a, out=out)
        out.mul_(2.0)
        rms_norm(out, a[0], 1e-5, normed)

    lanes = [("every SM", lab.streams.whole)]
    for name, split in lab.each_split():
        lanes += [(f"{name}: decode", lab.streams.decode(split)), (f"{name}: prefill", lab.streams.prefill(split))]
    for name, stream in lanes:
        found = captured(lab, stream, work)
        note = "the driver does not name every one" if 0 in found else ""
        foreign = len(found - {lab.streams.context(stream), 0})
        yield NONE.row(f"{name}: foreign contexts in its graph", foreign, "contexts", note=note)
        if not lab.dry:
            wrong = len(sms_of(stream, replayed=True) ^ sms_of(stream))
            yield NONE.row(f"{name}: SMs of a replay, not of a launch", wrong, "SMs")


def captured(lab: Lab, stream: Stream, work: Work) -> set[int]:
    """Contexts of what `work` launches, when captured on the stream."""
    lab.streams.settle()
    stream.run(work)
    stream.record().wait()
    graph = stream.capture(work)
    stream.replay(graph)
    stream.record().wait()
    return lab.streams.node_contexts(graph)


def sms_of(stream: Stream, *, replayed: bool = False) -> set[int]:
    """The numbers of the SMs that the stream's kernels use, launched or in a graph."""
    from pdmux_ray.device.cuda.kernels.which_sm import note_sms

    found = torch.full((stream.units * CTAS_AN_SM,), -1, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()

    def work() -> None:
        note_sms(found)

    stream.run(work)
    stream.record().wait()
    if replayed:
        graph = stream.capture(work)
        found.fill_(-1)
        torch.cuda.synchronize()
        stream.replay(graph)
        stream.record().wait()
    return set(found.tolist())
