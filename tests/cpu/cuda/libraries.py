"""Doubles of two libraries' attention over pages: they do what it documents, in float32, and keep what they are asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor


def attended(q: Tensor, keys: Tensor, values: Tensor, scale: float, left: int) -> Tensor:
    """q [n, NH, D], the last n of the tokens of keys and values [c, KVH, D]; sees itself and `left` tokens before (-1: all)."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.float().repeat_interleave(group, 1) for x in (keys, values))
    at, key_at = torch.arange(len(keys) - len(q), len(keys))[:, None], torch.arange(len(keys))
    seen = key_at <= at
    if left >= 0:
        seen &= key_at >= at - left
    scores = torch.einsum("nhd,chd->hnc", q.float(), keys) * scale
    return torch.einsum("hnc,chd->nhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values).to(q.dtype)


@dataclass
class Varlen:
    """torch.nn.attention.varlen.varlen_attn_out, with a block table."""

    calls: list[dict[str, Any]] = field(default_factory=list)

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
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
        seqused_k: Tensor | None = None,
        block_table: Tensor | None = None,
        num_splits: int | None = None,
    ) -> Tensor:
        assert seqused_k is not None
        assert block_table is not None
        assert cu_seq_k is not None
        assert scale is not None
        assert enable_gqa or query.shape[1] == key.shape[2]
        assert {x.dtype for x in (cu_seq_q, cu_seq_k, seqused_k, block_table)} == {torch.int32}
        assert all(x.stride(-1) == 1 for x in (out, query, key, value, block_table))
        assert all(x.is_contiguous() for x in (cu_seq_q, cu_seq_k, seqused_k))
        assert cu_seq_k.diff().tolist() == seqused_k.tolist()
        assert window_size[1] == 0
        assert num_splits == 1, "contexts are cut by the device's SMs, or wrongly"
        self.calls.append({"max_q": max_q, "max_k": max_k, "window": window_size, "queries": cu_seq_q.diff().tolist()})
        for row, length in enumerate(seqused_k.tolist()):
            rows = slice(int(cu_seq_q[row]), int(cu_seq_q[row + 1]))
            assert rows.stop - rows.start <= max_q
            assert length <= max_k
            keys, values = (x[block_table[row].long()].flatten(0, 1)[:length] for x in (key, value))
            out[rows] = attended(query[rows], keys, values, scale, window_size[0])
        return torch.empty(0)


class Wrapper:
    """flashinfer.BatchPrefillWithPagedKVCacheWrapper. `made`: all of them."""

    made: ClassVar[list[Wrapper]] = []

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", *, backend: str = "auto") -> None:
        assert kv_layout == "HND"
        assert backend == "fa2", "others launch by the device's SMs, or have CTAs that wait"
        self.plans: list[dict[str, Any]] = []
        self.int_bytes = 0
        Wrapper.made.append(self)

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        self.int_bytes = int_workspace_buffer.nbytes

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
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        tensors = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(x.device.type == "cpu" and x.dtype == torch.int32 for x in tensors)
        assert (causal, disable_split_kv) == (True, True)
        assert qo_indptr[0] == paged_kv_indptr[0] == 0
        assert paged_kv_indptr[-1] == len(paged_kv_indices)
        assert bool(((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all())
        self.plans.append({"tensors": tensors, "scale": sm_scale, "left": window_left, "dtypes": (q_data_type, kv_data_type)})

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        plan = self.plans[-1]
        starts, ends, indices, last = (x.tolist() for x in plan["tensors"])
        assert len(q) == starts[-1]
        assert out.shape == q.shape
        for row, left in enumerate(last):
            pages = indices[ends[row] : ends[row + 1]]
            length = (len(pages) - 1) * paged_kv_cache[0].shape[2] + left
            keys, values = (x[pages].transpose(1, 2).flatten(0, 1)[:length] for x in paged_kv_cache)
            rows = slice(starts[row], starts[row + 1])
            out[rows] = attended(q[rows], keys, values, plan["scale"], plan["left"])
        return out


class OldWrapper(Wrapper):
    """Of a time when contexts were always cut."""

    def plan(self, qo_indptr: Tensor, paged_kv_indptr: Tensor) -> None:  # type: ignore[override]
        raise AssertionError


@dataclass
class FlashInfer:
    """The package."""

    BatchPrefillWithPagedKVCacheWrapper: type[Wrapper]
    __version__: str = "0.0.0"
