"""What a step tells the device, made ready in numpy: one buffer of named arrays, so that one copy takes all of it there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdmux_ray.engine.runner import SequenceView

_ALIGNMENT = 16  # bytes; kernels load whole vectors
_LARGEST = np.nextafter(np.float32(1), np.float32(0))
_IDLE_STEPS = 256  # a page table that has not been asked for in so many steps is forgotten

Arrays = dict[str, npt.NDArray[np.generic]]
Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Field:
    """An array in a buffer."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Packed:
    """Where each of some named arrays lies in one buffer of bytes, one after the other."""

    def __init__(self, fields: Mapping[str, Field]) -> None:
        self._fields = dict(fields)
        self._at: dict[str, int] = {}
        end = 0
        for name, part in fields.items():
            self._at[name] = end
            end += -(-torch.Size(part.shape).numel() * part.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = end

    def tensors(self, buffer: Tensor) -> Tensors:
        """Views of `buffer` [>= nbytes] uint8."""
        return {name: self._view(buffer, name, part) for name, part in self._fields.items()}

    def arrays(self, buffer: Tensor) -> Arrays:
        """Likewise, of a buffer on the host."""
        return {name: tensor.numpy() for name, tensor in self.tensors(buffer).items()}

    def _view(self, buffer: Tensor, name: str, part: Field) -> Tensor:
        size, at = torch.Size(part.shape).numel() * part.dtype.itemsize, self._at[name]
        return buffer[at : at + size].view(part.dtype).view(part.shape)


def packed_for(arrays: Mapping[str, npt.NDArray[np.generic]]) -> Packed:
    """The buffer that holds just these."""
    return Packed({name: Field(array.shape, torch.from_numpy(array).dtype) for name, array in arrays.items()})


SAMPLING: dict[str, torch.dtype] = {  # [N] each; as `SamplingParams` says
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
}


def fill_sampling(target: Arrays, sequences: Sequence[SequenceView]) -> None:
    """The first rows of the arrays of SAMPLING. A greedy row has temperature 0."""
    count, params = len(sequences), [sequence.params for sequence in sequences]
    target["temperature"][:count] = [0.0 if p.greedy else p.temperature for p in params]
    target["top_k"][:count] = [p.top_k for p in params]
    target["top_p"][:count] = [p.top_p for p in params]
    target["min_p"][:count] = [p.min_p for p in params]


def sampling_arrays(sequences: Sequence[SequenceView]) -> Arrays:
    """The arrays of SAMPLING, and "uniforms" [N]: the random number of each one's next token."""
    rows: Arrays = {name: np.zeros(len(sequences), dtype=_NUMPY[dtype]) for name, dtype in SAMPLING.items()}
    fill_sampling(rows, sequences)
    seeds, positions = [s.params.seed for s in sequences], [len(s.tokens) for s in sequences]
    rows["uniforms"] = uniforms(np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.uint64))
    return rows


_NUMPY: dict[torch.dtype, type[np.generic]] = {torch.float32: np.float32, torch.int32: np.int32}


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
    """`device.uniform.uniform` of each (seed, position), rounded to float32 and still below 1."""
    mixed = _mix(_mix(seeds) + positions * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(11)
    return np.minimum((mixed * 2.0**-53).astype(np.float32), _LARGEST)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's output function."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


@dataclass(slots=True)
class _Table:
    pages: list[int]
    array: npt.NDArray[np.int32]
    last_step: int


class PageTables:
    """The page table of each sequence as an array, kept between steps: comparing a list with what it was is ten times as fast
    as converting it."""

    def __init__(self) -> None:
        self._tables: dict[str, _Table] = {}  # by request id
        self._step = 0

    def begin_step(self) -> None:
        """Forgets what nobody has asked for in a while."""
        self._step += 1
        if self._step % _IDLE_STEPS == 0:
            kept = self._step - _IDLE_STEPS
            self._tables = {key: table for key, table in self._tables.items() if table.last_step >= kept}

    def of(self, sequence: SequenceView) -> npt.NDArray[np.int32]:
        """[pages] int32; valid until the next call for this sequence."""
        table, pages = self._tables.get(sequence.request_id), sequence.pages
        if table is None:
            table = self._tables[sequence.request_id] = _Table([], np.empty(0, dtype=np.int32), 0)
        table.last_step = self._step
        if table.pages != pages:
            self._take_in(table, list(pages))
        return table.array

    @staticmethod
    def _take_in(table: _Table, pages: list[int]) -> None:
        known = len(table.pages)
        if known and pages[:known] == table.pages:
            table.array = np.concatenate([table.array, np.array(pages[known:], dtype=np.int32)])
        else:
            table.array = np.array(pages, dtype=np.int32)
        table.pages = pages
