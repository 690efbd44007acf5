"""What computes the attention of prefills: this package's own kernel, torch's flash attention, or FlashInfer.

`engine.cuda.prefill_attention` names it; gpu-check `attention` measures those that are installed. All of them write into the
lane's buffers, and none has a CTA that waits for another (the contract in kernels/__init__.py):

    triton      the lane's SMs are an argument. Needs nothing else, and allocates nothing.
    varlen      torch >= 2.12.1, pages of 256 tokens or a multiple. One CTA for each head and 64 or 128 queries, as many as the
                work has; cutting contexts, which goes by the device's SMs (and gives wrong results for several sequences:
                pytorch#194167), is switched off. torch allocates a logarithm for each query and head at every call.
    flashinfer  the package, and what it compiles with (nvcc), or its cache of compiled kernels. Likewise: kernel family fa2,
                since fa3 launches a CTA for each SM of the device, and contexts are not cut. A pass is planned on the host, at
                its first layer, which copies a little on the lane's stream.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from pdmux_ray.device.cuda.kernels.prefill_attention import prefill_attention
from pdmux_ray.errors import ConfigError, IntegrityError
from pdmux_ray.model.ops import AttentionBatch, AttentionSpec

KEY = "engine.cuda.prefill_attention"
NAMES = ("triton", "varlen", "flashinfer")

_untyped: Any = torch.cuda  # its classes' constructors have no types

_VARLEN_PAGE = 256  # tokens; torch's own kernels take pages of this, or of a multiple
_FLOATS_BYTES = 2**24  # FlashInfer asks for a buffer of partial results; whole contexts have none
_PLAN_BYTES = 2**20  # of a plan: 12 bytes for each tile of 16 (query, head) pairs at least, and the page table's outline
_SPARE_PLANS = 2  # beside the longest job's: of a job that overtakes it, and of a step in one pass


class PrefillAttention(Protocol):
    """Of one lane."""

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch, spec: AttentionSpec, out: Tensor
    ) -> None:
        """Causal attention of all sequences but the decodes: query [T, NH D or more] (rotated) -> out [T, NH D], of which the
        decodes' rows are left alone. keys, values [pages, KVH, page_size, D]: one layer of the pool; new tokens are there."""


# (SMs of the lane, sequences of its largest step) -> its attention
MakeAttention = Callable[[int, int], PrefillAttention]


@dataclass(frozen=True, slots=True)
class Needs:
    """What a backend is to cope with. `plans`: passes of the longest job, times the kinds of windows that layers have."""

    device: torch.device
    dtype: torch.dtype
    page_size: int
    head_dim: int
    plans: int


def attention_by(name: str, needs: Needs) -> MakeAttention:
    """`name`: one of NAMES. Raises ConfigError for a library that is not installed, too old, or not made for this."""
    if name == "triton":
        return TritonPrefill
    if needs.dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError(f"{KEY}: {name} computes in bfloat16 and float16, not in {needs.dtype}: {_OTHERWISE}")
    if name == "varlen":
        return _varlen(needs)
    if name == "flashinfer":
        return _flash_infer(needs)
    raise ConfigError(f"{KEY} is one of {', '.join(NAMES)}, not {name!r}")


_OTHERWISE = f"leave {KEY} out, which is triton"


class TritonPrefill:
    """See kernels/prefill_attention.py."""

    def __init__(self, sms: int, max_sequences: int) -> None:
        self._sms, self._max_sequences = sms, max_sequences

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch, spec: AttentionSpec, out: Tensor
    ) -> None:
        first, sms = batch.decodes, self._sms
        table, starts, contexts = batch.page_table[first:], batch.query_starts[first:], batch.context_lengths[first:]
        prefill_attention(query, keys, values, table, starts, contexts, spec.scale, spec.window, sms, self._max_sequences, out)


class VarlenAttnOut(Protocol):
    """torch.nn.attention.varlen.varlen_attn_out, as far as it is used. With a `block_table` [N, pages] int32 keys and values
    are [pages, page_size, KVH, D], of any strides. A window of (-1, 0) is causal, of (w, 0) also limited to w tokens before."""

    def __call__(
        self,
        out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        *,
        scale: float | None = ...,
        window_size: tuple[int, int] = ...,
        enable_gqa: bool = ...,
        seqused_k: Tensor | None = ...,
        block_table: Tensor | None = ...,
        num_splits: int | None = ...,
    ) -> object: ...


class VarlenPrefill:
    """torch's flash attention for sequences of several lengths, over pages."""

    def __init__(self, attend: VarlenAttnOut) -> None:
        self._attend = attend

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch, spec: AttentionSpec, out: Tensor
    ) -> None:
        first, known = batch.decodes, _known(batch)
        contexts, starts = batch.context_lengths[first:], known.query_starts[first:]
        self._attend(
            _by_heads(out, spec),
            _by_heads(query, spec),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            batch.query_starts[first:],
            _cumulated(contexts),
            max_q=int(starts.diff().max()),
            max_k=int(known.context_lengths[first:].max()),
            scale=spec.scale,
            window_size=(-1 if spec.window is None else spec.window - 1, 0),
            enable_gqa=True,
            seqused_k=contexts,
            block_table=batch.page_table[first:],
            num_splits=1,
        )


def _varlen(needs: Needs) -> MakeAttention:
    try:
        from torch.nn.attention.varlen import varlen_attn_out
    except ImportError:
        varlen_attn_out = None  # type: ignore[assignment]
    used = inspect.signature(VarlenAttnOut.__call__).parameters.keys() - {"self"}
    if varlen_attn_out is None or not used <= inspect.signature(varlen_attn_out).parameters.keys():
        raise ConfigError(
            f"{KEY}: varlen needs torch 2.12.1 or later, whose varlen_attn_out reads pages; this is torch {torch.__version__}. "
            f"Install that, or {_OTHERWISE}."
        )
    if needs.page_size % _VARLEN_PAGE:
        raise ConfigError(
            f"{KEY}: varlen reads pages of {_VARLEN_PAGE} tokens or a multiple, and engine.page_size is {needs.page_size}: "
            f"set it to {_VARLEN_PAGE}, or {_OTHERWISE}."
        )
    if needs.head_dim % 8:
        raise ConfigError(f"{KEY}: varlen needs a head_dim that 8 divides, and this model's is {needs.head_dim}: {_OTHERWISE}.")
    attention = VarlenPrefill(varlen_attn_out)
    return lambda sms, max_sequences: attention


class PagedPrefill(Protocol):
    """flashinfer.BatchPrefillWithPagedKVCacheWrapper with the layout HND, as far as it is used."""

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None: ...

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        window_left: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        disable_split_kv: bool,
    ) -> None:
        """All tensors int32 and on the host. Copies what it makes of them to the device on the current stream, from a buffer on
        the host that the next plan writes anew."""

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> object:
        """q and out [T, NH, D]; keys and values as `PrefillAttention` has them."""


# Notes where the current stream is; what it returns waits, on the host, until the stream has got there.
Mark = Callable[[], Callable[[], None]]


@dataclass(frozen=True, slots=True)
class _Plan:
    """`batch`: on the host; held, so that its id stays its own. `copied`: waits until the plan is on the device."""

    batch: AttentionBatch
    wrapper: PagedPrefill
    copied: Callable[[], None]


class FlashInferPrefill:
    """One for all prefill lanes, whose work is a chain. Every pass of a job has a plan of its own, which all its layers use:
    were there one for all, a job of several passes would be planned anew at each layer, and the host would wait each time."""

    def __init__(self, make: Callable[[], PagedPrefill], plans: int, mark: Mark) -> None:
        self._free = [make() for _ in range(plans + _SPARE_PLANS)]
        self._plans: OrderedDict[tuple[int, int | None], _Plan] = OrderedDict()  # the last used last
        self._mark = mark

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch, spec: AttentionSpec, out: Tensor
    ) -> None:
        known = _known(batch)
        rows = slice(int(known.query_starts[batch.decodes]), len(query))
        key = id(known), spec.window
        plan = self._plans.pop(key, None) or self._planned(known, batch.decodes, keys, spec)
        self._plans[key] = plan
        plan.wrapper.run(_by_heads(query[rows], spec), (keys, values), out=_by_heads(out[rows], spec))

    def _planned(self, known: AttentionBatch, decodes: int, keys: Tensor, spec: AttentionSpec) -> _Plan:
        if self._free:
            wrapper = self._free.pop()
        else:
            oldest = self._plans.popitem(last=False)[1]
            oldest.copied()
            wrapper = oldest.wrapper
        page_size = keys.shape[2]
        starts, contexts, table = known.query_starts[decodes:], known.context_lengths[decodes:], known.page_table[decodes:]
        counts = (contexts + page_size - 1) // page_size
        wrapper.plan(
            starts - starts[0],
            _cumulated(counts),
            table[torch.arange(table.shape[1]) < counts[:, None]],
            contexts - (counts - 1) * page_size,
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
            page_size,
            causal=True,
            sm_scale=spec.scale,
            window_left=-1 if spec.window is None else spec.window - 1,
            q_data_type=keys.dtype,
            kv_data_type=keys.dtype,
            disable_split_kv=True,
        )
        return _Plan(known, wrapper, self._mark())


def _flash_infer(needs: Needs) -> MakeAttention:
    try:
        import flashinfer
    except ImportError:
        raise ConfigError(f"{KEY}: flashinfer needs that package: `pip install flashinfer-python`, or {_OTHERWISE}.") from None
    kind: Any = getattr(flashinfer, "BatchPrefillWithPagedKVCacheWrapper", None)
    used = inspect.signature(PagedPrefill.plan).parameters.keys() - {"self"}
    if kind is None or not used <= inspect.signature(kind.plan).parameters.keys():
        version = getattr(flashinfer, "__version__", "unknown")
        raise ConfigError(f"{KEY}: flashinfer {version} cannot do what is asked of it: install a newer one, or {_OTHERWISE}.")
    floats = torch.empty(_FLOATS_BYTES, dtype=torch.uint8, device=needs.device)

    def make() -> PagedPrefill:
        wrapper: PagedPrefill = kind(floats, "HND", backend="fa2")
        wrapper.reset_workspace_buffer(floats, torch.empty(_PLAN_BYTES, dtype=torch.uint8, device=needs.device))
        return wrapper

    attention = FlashInferPrefill(make, needs.plans, _mark)
    return lambda sms, max_sequences: attention


def _mark() -> Callable[[], None]:
    event = _untyped.Event()
    event.record()
    wait: Callable[[], None] = event.synchronize
    return wait


def _known(batch: AttentionBatch) -> AttentionBatch:
    if batch.host is None:
        raise IntegrityError("the attention of a prefill is asked for without what the host knows of its step")
    return batch.host


def _by_heads(x: Tensor, spec: AttentionSpec) -> Tensor:
    """[T, NH D or more] -> [T, NH, D]."""
    return x[:, : spec.heads * spec.head_dim].view(len(x), spec.heads, spec.head_dim)


def _cumulated(counts: Tensor) -> Tensor:
    """[N] -> [N + 1] int32: where each one begins, and the end."""
    return functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
