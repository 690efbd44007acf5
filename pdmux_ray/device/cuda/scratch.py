"""The static buffers of one lane: whatever its operations compute on their way is written here, and nothing is allocated."""

from __future__ import annotations

import torch
from torch import Tensor

from pdmux_ray.errors import IntegrityError


class Scratch:
    """Named buffers of one lane; two lanes never share one. One thread at a time.

    A buffer is made when it is first asked for, in the warm-up, with as many rows as the longest step may need. Its address
    never changes: captured graphs hold it. What it holds stays there until the next operation that asks for the same buffer.
    """

    def __init__(
        self, device: torch.device | str, dtype: torch.dtype, max_tokens: int, max_sequences: int | None = None
    ) -> None:
        """`max_tokens`: of one step of the lane; `max_sequences`: of one step, and rows of logits (None: as many as tokens)."""
        self.device, self.dtype, self.max_tokens = torch.device(device), dtype, max_tokens
        self.max_sequences = max_tokens if max_sequences is None else max_sequences
        self._buffers: dict[tuple[str, int, int, torch.dtype], Tensor] = {}
        self._frozen = False

    @property
    def allocated_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def view(self, name: str, rows: int, width: int, dtype: torch.dtype | None = None, most: int | None = None) -> Tensor:
        """The first `rows` rows [rows, width] of the buffer of that name, size and dtype (None: the lane's).

        `most`: how many rows the buffer has; None: one for each of `max_tokens`.
        Raises IntegrityError when there are fewer, and when the buffer is new after `freeze`.
        """
        most = self.max_tokens if most is None else most
        if rows > most:
            raise IntegrityError(
                f"a step needs {rows} rows of the scratch buffer {name!r}, which has {most}: "
                "make the lane's Scratch with the tokens and sequences of its longest step"
            )
        key = (name, most, width, dtype or self.dtype)
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = self._make(*key)
        return buffer[:rows]

    def freeze(self) -> None:
        """Ends the warm-up: from now on a buffer that is not there yet is an error."""
        self._frozen = True

    def _make(self, name: str, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        if self._frozen:
            raise IntegrityError(
                f"the scratch buffer {name!r} ({rows} x {width}, {dtype}) is asked for only after the warm-up: "
                "run every operation of a step once before freeze()"
            )
        return torch.empty((rows, width), dtype=dtype, device=self.device)
