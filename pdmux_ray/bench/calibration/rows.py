"""Measured serving points, as a table has them: what was served on what, and the latencies that a closed loop saw.

Columns are those of aiconfigurator's validation data; what a line does not tell, of what it must, is the reason why it has no
estimate. A table tells some groups of GPUs twice: as the square of what they are (tensor times expert parallel); other rows
have the same measurement under its plain name. They are read as that.

Held out of a fit are whole kinds of rows, by a hash of the kind's name with that of the draw, `SPLIT`. It is the second draw:
what the first one held out had been looked at while the method was made, and is fitted now. docs/performance.md says which of
these kinds an earlier fit had used, or had its errors printed.
"""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pdmux_ray.errors import ConfigError

SPLIT = "held out, second draw"
HELD_OUT_PARTS = 3  # about every third kind
ENDINGS = ("-static-pertensor", "-fp8", "-nvfp4", "-fp4", "-instruct")
SAME = {"deepseek-r1": "deepseek-v3", "deepseek-v3.1": "deepseek-v3"}
SYSTEMS = {"h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm", "b300": "b300_sxm", "a100": "a100_sxm"}
FRAMEWORKS = {"tensorrt-llm": "trtllm", "tensorrt_llm": "trtllm", "trt-llm": "trtllm"}
PRECISIONS = {"bf16": "bfloat16", "fp4": "nvfp4"}
MOST = 2**20  # tokens of a prompt or an answer, requests at once, GPUs: a line with more is a mistake


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
        return int(hashlib.sha256(f"{SPLIT}: {self.kind}".encode()).hexdigest(), 16) % HELD_OUT_PARTS == 0


def plain_name(path: str) -> str:
    """Of a model's shape: without maker and precision, and without another training of the same."""
    name = path.rpartition("/")[2].lower().removeprefix("meta-")
    for ending in ENDINGS:
        name = name.removesuffix(ending)
    return SAME.get(name, name)


class UncostedError(Exception):
    """Why a row has no estimate."""


def read(path: Path) -> list[tuple[str, Row | UncostedError]]:
    """Each line: its id, and the row or why it is none. Raises ConfigError when it is no table."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            return [_read(number, line) for number, line in enumerate(csv.DictReader(lines), 2)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            f"cannot read {path}: {error!r}. It takes a table (CSV) with the columns that docs/simulate.md names."
        ) from None


def _read(number: int, line: Mapping[str, str | None]) -> tuple[str, Row | UncostedError]:
    told = _Line({column: (value or "").strip() for column, value in line.items() if isinstance(value, str | None)})
    name = told.of("id") or f"line {number}"
    try:
        return name, _row(name, told)
    except UncostedError as why:
        return name, why


@dataclass(frozen=True, slots=True)
class _Line:
    """Of a table: a column that it lacks is one that it does not tell."""

    values: Mapping[str, str]

    def of(self, column: str) -> str:
        return self.values.get(column, "")

    def must(self, column: str) -> str:
        """Raises UncostedError."""
        if not self.of(column):
            raise UncostedError(f"not told: {column}")
        return self.of(column)

    def number(self, column: str) -> float:
        """Above 0. Raises UncostedError."""
        value = _number(self.must(column))
        if not value > 0:
            raise UncostedError(f"a number is none: {column} of 0 or less")
        return value

    def whole(self, column: str, missing: int) -> int:
        """Raises UncostedError."""
        value = _number(self.of(column) or str(missing))
        if not 0 <= value <= MOST:
            raise UncostedError(f"a number is none: {column} below 0 or above {MOST:,}")
        return int(value)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UncostedError(f"a number is none: {text[:40]!r}") from None
    if not math.isfinite(value):
        raise UncostedError(f"a number is none: {text[:40]!r}")
    return value


def _row(name: str, line: _Line) -> Row:
    """Raises UncostedError."""
    together, prefill, decode = None, None, None
    if _is_together(line):
        together = _group(line, "")
        batch = line.whole("batch_size", 0) * together.dp
    else:
        prefill, decode = _pool(line, "prefill_"), _pool(line, "decode_")
        batch = line.whole("decode_batch_size", 0) * decode.workers * decode.group.dp
    concurrency = line.whole("concurrency", 0) or batch
    if not concurrency:
        raise UncostedError("neither concurrency nor batch size")
    system, framework = line.must("system").lower(), line.must("backend").lower()
    return Row(
        name=name,
        model=line.must("model_path"),
        system=SYSTEMS.get(system, system),
        framework=FRAMEWORKS.get(framework, framework),
        precision=line.of("precision"),
        gemm=_precision(line.of("gemm_quant_mode")),
        moe=_precision(line.of("moe_quant_mode")),
        prompt=_tokens(line, "isl"),
        output=_tokens(line, "osl"),
        concurrency=concurrency,
        together=together,
        prefill=prefill,
        decode=decode,
        ttft_s=line.number("silicon_ttft_ms") / 1e3,
        tpot_s=line.number("silicon_tpot_ms") / 1e3,
    )


def _precision(text: str) -> str:
    return PRECISIONS.get(text.lower(), text.lower())


def _is_together(line: _Line) -> bool:
    """Raises UncostedError."""
    mode = line.of("mode").lower() or ("disagg" if line.of("decode_num_workers") else "agg")
    if mode not in ("agg", "disagg"):
        raise UncostedError(f"mode {mode[:40]!r} is neither agg nor disagg")
    return mode == "agg"


def _tokens(line: _Line, column: str) -> int:
    """Raises UncostedError."""
    line.number(column)
    return max(line.whole(column, 0), 1)


def _pool(line: _Line, phase: str) -> Pool:
    """Raises UncostedError."""
    workers = line.whole(f"{phase}num_workers", 0)
    if not workers:
        raise UncostedError("not told how many engines prefill or decode")
    return Pool(_group(line, phase), workers)


def _group(line: _Line, phase: str) -> Group:
    """Raises UncostedError."""
    if line.whole(f"{phase}pp_size", 1) > 1:
        raise UncostedError("pipeline parallel")
    names = ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
    return Group.of(*(max(line.whole(phase + name, 1), 1) for name in names))
