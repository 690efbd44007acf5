"""An estimate of what a long prefill does to decodes, in four ways of sharing one H100: the table of a handbook on inference.

Its model and ours have the same terms and other constants, so the table is made twice: with ours, and with the handbook's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdmux_ray.bench.literature.fleets import StepTimes
from pdmux_ray.bench.literature.rows import Comparison, Row
from pdmux_ray.costs.gpu import H100, GpuModel
from pdmux_ray.costs.sm_share import Assumptions, Ramp, WholeTimes, parameters_of
from pdmux_ray.latency.features import BATCH_KNOTS, TOKEN_KNOTS
from pdmux_ray.latency.model import FittedCosts
from pdmux_ray.policy.views import CostModel, Piece

QWEN3_8B = GpuModel("Qwen3-8B", "Qwen/Qwen3-8B", 6.946e9, 151_936, 36, 4096, 32, 8, 128, 40_960)
BATCH, CONTEXT, PROMPT = 32, 2048, 8192
CHUNKS = (2048, 512)
PREFILL_UNITS, DECODE_UNITS = 80, 52  # what SGLang gives to 32 decodes on an H100
FULL_FROM = (44, 66, 88)  # SMs from which decodes have the whole bandwidth: the handbook's three guesses

BANDWIDTH_EFFICIENCY = 0.85  # the handbook's
COMPUTE_EFFICIENCY = 0.5


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of one way."""

    itl_s: float  # mean of the steps meanwhile
    prefill_s: float


def alone(costs: CostModel) -> float:
    """A step of the decodes, without any prefill."""
    return costs.decode(BATCH, BATCH * CONTEXT, H100.units, 0).predicted_s


def first(costs: CostModel) -> Estimate:
    """The prefill first: one gap holds all of it."""
    prefill_s = costs.prefill((Piece(PROMPT, 0),), QWEN3_8B.layers, H100.units, 0, last=True).predicted_s
    return Estimate(prefill_s + alone(costs), prefill_s)


def chunked(costs: CostModel, chunk: int) -> Estimate:
    """Each step decodes and takes a chunk."""
    starts = range(0, PROMPT, chunk)
    steps = [costs.mixed(BATCH, BATCH * CONTEXT, (Piece(chunk, start),), H100.units).predicted_s for start in starts]
    return Estimate(sum(steps) / len(steps), sum(steps))


def split(costs: CostModel) -> Estimate:
    """Both at once, on SMs of their own."""
    pieces = (Piece(PROMPT, 0),)
    prefill_s = costs.prefill(pieces, QWEN3_8B.layers, PREFILL_UNITS, DECODE_UNITS, last=True).predicted_s
    return Estimate(costs.decode(BATCH, BATCH * CONTEXT, DECODE_UNITS, PREFILL_UNITS).predicted_s, prefill_s)


def handbook_costs(full_from: int) -> FittedCosts:
    """Our formula with the handbook's constants: neither lane costs the other anything but its SMs, nothing but bytes and
    products takes time, and every token of a prompt goes through the output head, too."""
    shape, flop_per_s = QWEN3_8B, H100.flop_per_s * COMPUTE_EFFICIENCY
    parameters_read = shape.parameters + shape.vocabulary * shape.hidden
    bytes_per_s = H100.bytes_per_s * BANDWIDTH_EFFICIENCY
    read_s, token_s = 2 * parameters_read / bytes_per_s, 2 * parameters_read / flop_per_s
    pair_s = 4 * shape.heads * shape.head_dim * shape.layers / flop_per_s
    times = WholeTimes(
        step_s=0.0,
        block_s=0.0,
        rows=Ramp.line(BATCH_KNOTS, read_s, 0.0),
        context_s=shape.kv_bytes_per_token / bytes_per_s,
        pass_row_s=0.0,
        tokens=Ramp(TOKEN_KNOTS, tuple(max(read_s, token_s * tokens) for tokens in TOKEN_KNOTS), token_s),
        own_s=pair_s,
        reused_s=pair_s,
        exchange_rows=Ramp.line(BATCH_KNOTS, 0.0, 0.0),
        exchange_tokens=Ramp.line(TOKEN_KNOTS, 0.0, 0.0),
    )
    apart = Assumptions(compute_exponent=1.0, read_loss=1.0, decode_beside=0.0, prefill_beside=0.0, host_s=0.0)
    return FittedCosts(parameters_of(times, shape.layers, H100.units, [(full_from, 1.0)], bytes_per_s, apart))


def compare(steps: StepTimes) -> Comparison:
    ours, theirs = steps.device(H100, QWEN3_8B).costs, handbook_costs(FULL_FROM[1])
    spread = [split(handbook_costs(full_from)).itl_s * 1e3 for full_from in FULL_FROM]
    flop = 2 * QWEN3_8B.parameters * PROMPT + 2 * QWEN3_8B.heads * QWEN3_8B.head_dim * QWEN3_8B.layers * PROMPT**2
    used = flop / (H100.flop_per_s * first(ours).prefill_s)
    return Comparison(
        "The estimate table: an 8,192-token prefill beside 32 decodes on one H100",
        "the chapter on PD multiplexing of a handbook on inference systems: Qwen3-8B, bfloat16, contexts of 2,048 tokens.",
        [*rows("", ours), *rows(", with the handbook's constants", theirs, spread)],
        [
            f"{steps} The handbook: 85 % of the bandwidth, 50 % of the compute, and decodes that have the whole bandwidth from "
            f"44, 66 or 88 SMs on."
        ],
        f"With its constants our formula gives its table; but steps with chunks here read the decodes' contexts, too. Ours are "
        f"measured: this prefill reaches {used:.0%} of the peak, not 50 %. On {DECODE_UNITS} SMs decodes take "
        f"{slower(ours, 0):.2f} times as long as on all, and {slower(ours, PREFILL_UNITS):.2f} times beside the prefill, which "
        f"draws bandwidth: the handbook leaves that out.",
    )


def slower(costs: CostModel, beside: int) -> float:
    """How many times as long the decodes' step takes on their part, the rest being idle (0) or prefilling."""
    return costs.decode(BATCH, BATCH * CONTEXT, DECODE_UNITS, beside).predicted_s / alone(costs)


def rows(how: str, costs: CostModel, spread: Sequence[float] = ()) -> list[Row]:
    """`spread`: ITLs of PD multiplexing in ms, one for each of the handbook's guesses."""
    guessed = None if not spread else f"{min(spread):.3g} to {max(spread):.3g}"
    found = [Row(f"decodes alone{how}: ITL", 9.0, alone(costs) * 1e3, "ms")]
    found.append(Row(f"prefill first{how}: prefill", 291.0, first(costs).prefill_s * 1e3, "ms"))
    for chunk, itl_ms, prefill_ms in zip(CHUNKS, (74.0, 19.0), (295.0, 306.0), strict=True):
        way = chunked(costs, chunk)
        found.append(Row(f"chunks of {chunk}{how}: ITL", itl_ms, way.itl_s * 1e3, "ms"))
        found.append(Row(f"chunks of {chunk}{how}: prefill", prefill_ms, way.prefill_s * 1e3, "ms"))
    both = split(costs)
    name = f"PD multiplexing {PREFILL_UNITS}/{DECODE_UNITS}{how}"
    found.append(Row(f"{name}: ITL", 11.0, both.itl_s * 1e3, "ms", published_as="9 to 15", ours_as=guessed))
    return [*found, Row(f"{name}: prefill", 480.0, both.prefill_s * 1e3, "ms")]
