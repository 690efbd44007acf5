"""Tokens that the device samples, against those of the host's sampler for the same logits and random numbers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pdmux_ray.device.cuda.kernels import sampling as kernels
from pdmux_ray.device.sampler import Sampler
from pdmux_ray.device.uniform import uniform
from pdmux_ray.gpu_check.lab import Lab
from pdmux_ray.gpu_check.report import NONE, Limit, Row
from pdmux_ray.latency.measure import StillSequence
from pdmux_ray.types import SamplingParams

FEW = Limit(2.0, speed=False)  # percent: a number that falls within float32's rounding of two tokens' border may pick either
ROWS = 128
_SPREAD = 4.0  # of the logits: about as peaked as a trained model's

_FILTERS = {
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
    "all three, temperature 0.7": {"top_k": 50, "top_p": 0.9, "min_p": 0.02, "temperature": 0.7},
}


def sampling(lab: Lab) -> Iterator[Row]:
    device, rows = lab.streams.device, 8 if lab.dry else ROWS
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(rows, lab.sizes.middle.vocab_size, generator=generator) * _SPREAD).to(device)
    found = torch.empty(rows, dtype=torch.int64, device=device)
    lab.compute(lambda: kernels.greedy(logits, found))
    yield NONE.row("greedy: rows that differ", int((found != logits.argmax(-1)).sum()), "rows")
    for what, values in _FILTERS.items():
        params = [SamplingParams(seed=row, **values) for row in range(rows)]  # type: ignore[arg-type]
        yield FEW.row(f"{what}: rows that differ", 100 * differing(lab, logits, params) / rows, "%")


def differing(lab: Lab, logits: torch.Tensor, params: list[SamplingParams]) -> int:
    """Rows for which device and host choose different tokens."""
    device = logits.device
    numbers = torch.tensor([uniform(p.seed, 1) for p in params], dtype=torch.float32, device=device)
    temperature, top_p, min_p = (
        torch.tensor([getattr(p, name) for p in params], dtype=torch.float32, device=device)
        for name in ("temperature", "top_p", "min_p")
    )
    top_k = torch.tensor([p.top_k for p in params], dtype=torch.int32, device=device)
    found = torch.empty(len(params), dtype=torch.int64, device=device)
    lab.compute(lambda: kernels.draw(logits, numbers, temperature, top_k, top_p, min_p, found))
    host = Sampler().sample(logits.cpu(), [StillSequence(str(row), [0], [], p) for row, p in enumerate(params)])
    return sum(token != other for token, other in zip(found.tolist(), host.tokens, strict=True))
