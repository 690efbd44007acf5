"""Every operation of a layer on the device, in the dtype that serves, against the float32 reference on the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pdmux_ray.device.cuda.ops import CudaOps
from pdmux_ray.device.cuda.prefill_backends import MakeAttention, TritonPrefill
from pdmux_ray.device.cuda.scratch import Scratch
from pdmux_ray.gpu_check.lab import Lab
from pdmux_ray.gpu_check.report import Limit, Row, Verdict
from pdmux_ray.model.ops import AttentionBatch, AttentionSpec
from pdmux_ray.model.reference_ops import ReferenceOps
from pdmux_ray.model.rope import Rope, RopeSpec

# |out - reference| / |reference| (Frobenius). A bf16 result is off by up to 2^-9 of itself; rotated inputs and weights of
# attention, which are rounded, too, add a few of those.
RELATIVE_ERROR = Limit(0.02, speed=False)
PAGE_SIZE = 16
EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Step:
    """`queries` and `contexts` in tokens, one entry a sequence; contexts include the queries."""

    what: str
    heads: int
    kv_heads: int
    head_dim: int
    queries: tuple[int, ...]
    contexts: tuple[int, ...]
    window: int | None = None
    qk_norm: bool = False
    decodes: int = 0  # of the sequences, when there are others, too
    page_size: int = PAGE_SIZE


def operations(lab: Lab) -> Iterator[Row]:
    units = lab.streams.units
    levels = sorted({units, *(split.decode_units for split in lab.splits[:1])}, reverse=True)
    for step in steps(lab):
        for sms in levels:
            yield RELATIVE_ERROR.row(f"{step.what}, {sms} SMs", attention_error(lab, step, sms))
    yield _far(lab)
    yield from _others(lab)


def steps(lab: Lab) -> list[Step]:
    """Decodes of unequal contexts, prefills with and without cached prefixes; grouped queries, windows, q/k norm."""
    longest, found = lab.sizes.kernel_context, []
    contexts = (longest, longest // 2, 17, 1)
    ones, fresh = (1,) * len(contexts), (longest // 3, 16, 1)
    for dim in lab.sizes.head_dims:
        found.append(Step(f"decode attention, head_dim {dim}", 8, 2, dim, ones, contexts))
        found.append(Step(f"prefill attention, head_dim {dim}", 8, 2, dim, fresh, fresh))
    dim = lab.sizes.head_dims[len(lab.sizes.head_dims) // 2]
    window, cached = longest // 4, (longest, 20, 9)
    found += [
        Step("decode attention, window, q/k norm", 8, 8, dim, ones, contexts, window, True),
        Step("prefill attention, cached prefixes", 8, 1, dim, (longest // 3, 3, 9), cached),
        Step("prefill attention, cached, window, q/k norm", 4, 2, dim, (longest // 3, 3, 9), cached, window, True),
        Step("decode attention, 40 sequences", 8, 2, dim, (1,) * 40, tuple(1 + row * longest // 40 for row in range(40))),
        mixed(longest, dim),
    ]
    return found


def mixed(longest: int, dim: int) -> Step:
    """So many decodes that the views of the others' entries begin where no vector does."""
    return Step("decodes and prefills", 8, 2, dim, (1, 1, 1, longest // 3, 5), (longest, 17, 1, longest // 3, 20), decodes=3)


def _far(lab: Lab) -> Row:
    """On pages whose elements are beyond what 32 bits count, when the device has room for them. A dry run's are nearer."""
    step = mixed(lab.sizes.kernel_context, lab.sizes.head_dims[len(lab.sizes.head_dims) // 2])
    elements, what = 2**12 if lab.dry else 2**31, f"{step.what}, pages beyond 2^31 elements"
    needed = 3 * elements * lab.dtype.itemsize  # keys and values, and as much as a half again
    lab.streams.settle()
    if lab.streams.free_bytes() < needed:
        note = f"it needs {needed / 2**30:.0f} GiB of GPU memory"
        return Row(what, "not run", verdict=Verdict.NOT_JUDGED, note=note)
    pages = elements // (step.kv_heads * PAGE_SIZE * step.head_dim)
    return RELATIVE_ERROR.row(what, attention_error(lab, step, lab.streams.units, pages))


def attention_error(lab: Lab, step: Step, sms: int, pages_before: int = 0, attention: MakeAttention = TritonPrefill) -> float:
    """Of q/k norm, RoPE, KV write and attention together. What the step wrote into the pool counts, too. `pages_before`: in the
    pool, before those of the step. `attention`: of prefills."""
    device, seed = lab.streams.device, 0
    pool, qkv, batch, spec = make(step, device, lab.dtype, seed)
    expected_pool = pool.float()
    expected = ReferenceOps(expected_pool).qkv_to_attention(0, qkv.float(), batch, _wide(spec))
    pool, batch = _moved(pool, batch, pages_before)
    scratch = Scratch(device, lab.dtype, len(qkv), len(step.contexts))
    found = torch.empty(len(qkv), step.heads * step.head_dim, dtype=lab.dtype, device=device)
    ops = CudaOps(pool, scratch, sms, attention)
    _run(lab, found, lambda: ops.qkv_to_attention(0, qkv, batch, spec))
    return max(relative_error(found, expected), relative_error(pool[:, :, pages_before:], expected_pool))


def _moved(pool: Tensor, batch: AttentionBatch, pages: int) -> tuple[Tensor, AttentionBatch]:
    """The same in a pool with so many pages more, in front, which hold anything."""
    larger = torch.empty(*pool.shape[:2], pages + pool.shape[2], *pool.shape[3:], dtype=pool.dtype, device=pool.device)
    larger[:, :, pages:] = pool
    host = batch.host
    assert host is not None
    host = replace(host, slots=host.slots + pages * pool.shape[4], page_table=host.page_table + pages)
    return larger, _on(pool.device, host)


def _on(device: torch.device, host: AttentionBatch) -> AttentionBatch:
    """The same on the device, too."""
    names = ("positions", "slots", "query_starts", "context_lengths", "page_table")
    return replace(host, **{name: getattr(host, name).to(device) for name in names}, host=host)


def make(
    step: Step, device: torch.device, dtype: torch.dtype, seed: int
) -> tuple[Tensor, Tensor, AttentionBatch, AttentionSpec]:
    """A pool of one layer whose pages lie in random order, the step's qkv, where its tokens live, and what to compute."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    size = step.page_size
    counts = [-(-context // size) for context in step.contexts]
    order = torch.randperm(sum(counts) + 1, generator=generator).int()
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    positions, slots, first = [], [], 0
    for row, (queries, context, count) in enumerate(zip(step.queries, step.contexts, counts, strict=True)):
        own = table[row, :count] = order[first : first + count]
        first += count
        places = torch.arange(context - queries, context)
        positions.append(places)
        slots.append(own.long()[places // size] * size + places % size)
    host = AttentionBatch(
        positions=torch.cat(positions),
        slots=torch.cat(slots),
        query_starts=torch.tensor([0, *step.queries]).cumsum(0).int(),
        context_lengths=torch.tensor(step.contexts, dtype=torch.int32),
        page_table=table,
        decodes=step.decodes,
    )
    norms = [noise(step.head_dim) if step.qk_norm else None for _ in range(2)]
    inv_freq = 1e4 ** -(torch.arange(0, step.head_dim, 2) / step.head_dim)
    rope = Rope(RopeSpec("default", tuple(inv_freq.tolist())), max(step.contexts), device)
    spec = AttentionSpec(
        step.heads, step.kv_heads, step.head_dim, step.head_dim**-0.5, step.window, rope, norms[0], norms[1], EPS
    )
    pool = noise(1, 2, len(order), step.kv_heads, size, step.head_dim)
    return pool, noise(sum(step.queries), (step.heads + 2 * step.kv_heads) * step.head_dim), _on(device, host), spec


def _wide(spec: AttentionSpec) -> AttentionSpec:
    q_norm, k_norm = (None if norm is None else norm.float() for norm in (spec.q_norm, spec.k_norm))
    return replace(spec, q_norm=q_norm, k_norm=k_norm)


def _others(lab: Lab) -> Iterator[Row]:
    """What has no KV: norms, activations, matrix products."""
    device, shape = lab.streams.device, lab.sizes.small
    rows, width = 33, shape.hidden
    pool = torch.zeros(1, 2, 1, 1, PAGE_SIZE, shape.head_dim, dtype=lab.dtype, device=device)
    ops = CudaOps(pool, Scratch(device, lab.dtype, rows), lab.streams.units)
    plain = ReferenceOps(pool.float())
    generator = torch.Generator().manual_seed(1)
    x, residual, gate_up = (torch.randn(rows, n * width, generator=generator).to(lab.dtype).to(device) for n in (1, 1, 2))
    norm, matrix = (torch.randn(*s, generator=generator).to(lab.dtype).to(device) for s in ((width,), (width, width)))
    packed = ops.pack_linear(matrix, None)
    results: dict[str, tuple[Callable[[], Tensor], Tensor]] = {
        "RMS norm": (lambda: ops.rms_norm(x, norm, EPS), plain.rms_norm(x.float(), norm.float(), EPS)),
        "SiLU and product": (lambda: ops.silu_mul(gate_up), plain.silu_mul(gate_up.float())),
        "linear": (lambda: ops.linear(x, packed), plain.linear(x.float(), (matrix.float(), None))),
        "linear with residual": (
            lambda: ops.linear(x, packed, residual=residual.clone()),
            plain.linear(x.float(), (matrix.float(), None), residual.float()),
        ),
    }
    for what, (compute, expected) in results.items():
        found = torch.empty(expected.shape, dtype=lab.dtype, device=device)
        _run(lab, found, compute)
        yield RELATIVE_ERROR.row(what, relative_error(found, expected))


def _run(lab: Lab, found: Tensor, compute: Callable[[], Tensor]) -> None:
    """Computes on the whole device, and keeps the result, which may lie in scratch."""

    def work() -> None:
        found.copy_(compute())

    lab.compute(work)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """NaN when either has one."""
    return float((found.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30))
