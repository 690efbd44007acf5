"""Measured serving points, as a table has them: what was served on what, and the latencies that a closed loop saw.

Columns are those of aiconfigurator's validation data. A table tells some groups of GPUs twice: as the square of what they are
(tensor times expert parallel); other rows have the same measurement under its plain name. They are read as that.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pdmux_ray.errors import ConfigError

HELD_OUT_PARTS = 3  # about every third kind
ENDINGS = ("-static-pertensor", "-fp8", "-nvfp4", "-fp4", "-instruct")
SAME = {"deepseek-r1": "deepseek-v3", "deepseek-v3.1": "deepseek-v3"}


@dataclass(frozen=True, slots=True)
class Group:
    """The GPUs that hold one copy of the model: `tp` x `dp` of them."""

    tp: int
    dp: int  # ranks of attention, each with requests of its own
    moe_tp: int
    moe_ep: int

    @classmethod
    def of(cls, tp: int, dp: int, moe_tp: int, moe_ep: int) -> Group:
        if moe_tp == moe_ep > 1 and tp * dp == moe_tp * moe_ep > 8:
            return cls(moe_tp, 1, 1, moe_ep) if dp == 1 else cls(1, moe_tp, 1, moe_ep)
        if tp == dp > 1 and moe_ep == tp * dp:
            return cls(tp, 1, moe_tp, tp)
        return cls(tp, dp, moe_tp, moe_ep)


@dataclass(frozen=True, slots=True)
class Pool:
    """The engines that do one phase of disaggregated serving."""

    group: Group
    workers: int


@dataclass(frozen=True, slots=True)
class Row:
    """`together`: what prefills and decodes; else `prefill` and `decode`. Lengths in tokens, latencies in seconds."""

    name: str
    model: str
    system: str
    framework: str
    precision: str
    gemm: str
    moe: str
    prompt: int
    output: int
    concurrency: int
    together: Group | None
    prefill: Pool | None
    decode: Pool | None
    ttft_s: float
    tpot_s: float

    @property
    def kind(self) -> str:
        """Of which model on which GPU by which framework it tells."""
        return f"{plain_name(self.model)} on {self.system} by {self.framework}"

    @property
    def held_out(self) -> bool:
        """Whole kinds are: rows of one kind repeat each other's measurements, so a row alone would not be."""
        return int(hashlib.sha256(self.kind.encode()).hexdigest(), 16) % HELD_OUT_PARTS == 0


def plain_name(path: str) -> str:
    """Of a model's shape: without maker and precision, and without another training of the same."""
    name = path.rpartition("/")[2].lower().removeprefix("meta-")
    for ending in ENDINGS:
        name = name.removesuffix(ending)
    return SAME.get(name, name)


class UncostedError(Exception):
    """Why a row has no estimate."""


def read(path: Path) -> list[tuple[str, Row | UncostedError]]:
    """Each line: its id, and the row or why it is none. Raises ConfigError when it is no such table."""
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            return [(line["id"], _read(line)) for line in csv.DictReader(lines)]
    except (OSError, KeyError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read {path}: {error!r}. It takes a table (CSV) with the columns that docs/simulate.md names."
        ) from None


def _read(line: Mapping[str, str]) -> Row | UncostedError:
    try:
        return _row(line)
    except UncostedError as why:
        return why
    except ValueError as error:
        return UncostedError(f"a number is none: {error}")


def _row(line: Mapping[str, str]) -> Row:
    together, prefill, decode = None, None, None
    if line["mode"] == "agg":
        together = _group(line, "")
        batch = _whole(line["batch_size"] or "0") * max(together.dp, 1)
    else:
        prefill, decode = _pool(line, "prefill_"), _pool(line, "decode_")
        batch = _whole(line["decode_batch_size"] or "0") * decode.workers * decode.group.dp
    concurrency = _whole(line["concurrency"] or "0") or batch
    if not concurrency:
        raise UncostedError("neither concurrency nor batch size")
    return Row(
        name=line["id"],
        model=line["model_path"],
        system=line["system"],
        framework=line["backend"],
        precision=line["precision"],
        gemm=line["gemm_quant_mode"],
        moe=line["moe_quant_mode"],
        prompt=_whole(line["isl"]),
        output=_whole(line["osl"]),
        concurrency=concurrency,
        together=together,
        prefill=prefill,
        decode=decode,
        ttft_s=float(line["silicon_ttft_ms"]) / 1e3,
        tpot_s=float(line["silicon_tpot_ms"]) / 1e3,
    )


def _pool(line: Mapping[str, str], phase: str) -> Pool:
    if not line[f"{phase}num_workers"]:
        raise UncostedError("not told how many engines prefill or decode")
    return Pool(_group(line, phase), _whole(line[f"{phase}num_workers"]))


def _group(line: Mapping[str, str], phase: str) -> Group:
    if _whole(line[f"{phase}pp_size"] or "1") != 1:
        raise UncostedError("pipeline parallel")
    names = ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
    return Group.of(*(max(_whole(line[phase + name] or "1"), 1) for name in names))


def _whole(text: str) -> int:
    return int(float(text))
