"""How long steps take on a GPU that nobody has at hand: a `CostModel` from published figures, of the shape of a profile.

    weights_s = bytes of weights / bandwidth            a step reads all of them once
    context_s = bytes of a token's KV / KV bandwidth    a decode reads its context's
    token_s   = 2 * parameters / compute rate           a prefill computes a token
    pair_s    = 4 * heads * head_dim * layers / attention rate     and its attention to another

A prefill takes the longer one of reading weights and computing. Rates are of the whole GPU. On u of its U multiprocessors (SM)
compute is u / U of that (Bullet, arXiv:2504.19516: C_p = C_peak * N_p / N), and reading goes by `decode_slower`, as measured.

Where the figures are from:
- `bytes_per_s`, `flop_per_s`, `link_bytes_per_s`: the vendor's, times the efficiencies below.
- The efficiencies follow from step times of Llama-3.1-8B (bfloat16, TP 1, vLLM) on an H200 in the measured database of
  aiconfigurator 0.12: prefill of 1,024 tokens 21.2 ms, of 4,096 92.8 ms, of 4,096 after 4,096 106.8 ms; decode of 1 request
  4.86 ms, of 32 6.32 ms, of 128 9.94 ms with a context of 1,024, of 32 with 8,192 13.4 ms. Not fitted to anything else.
- An H100 is an H200 with its own memory: the same chip. Shapes are those of the models' config.json.
- `decode_slower`: decode step times by SM in the predictor tables that the authors of PD multiplexing (MuxWise,
  arXiv:2504.14489) published: an H800, batch 32, 64K tokens; an A100, 8B.
- `DECODE_BESIDE`: MuxWise reports decodes at most 30 % slower beside a prefill at fixed SMs on H100 (20 % on A100). What of the
  bandwidth a prefill draws is chosen so.
- `GUARD`: MuxWise's predictor errs by 8.2 % (prefill) and 8.8 % (decode) at most.
- Assumed, without a source: `PREFILL_BESIDE`, and that a multiprocessor that both lanes use serves each half of the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from kv_transfer.layout import KVLayout
from pdmux_ray.latency.features import BATCH_KNOTS, TOKEN_KNOTS
from pdmux_ray.latency.model import SIZES_S, Contention, FittedCosts, LaneModel, Parameters, bandwidth_at
from pdmux_ray.sim.device import DeviceModel
from pdmux_ray.types import Split

WEIGHTS_EFFICIENCY = 0.8  # of the bandwidth, reading weights: aiconfigurator's own figure
CONTEXT_EFFICIENCY = 0.885  # reading KV
COMPUTE_EFFICIENCY = 0.75  # of the peak, in matrix products
OWN_EFFICIENCY = 0.303  # attention to tokens of the same prefill
REUSED_EFFICIENCY = 0.64  # and to those before it
STEP_S = 0.95e-3  # of a step, whatever it does: launches and the host
ROW_S = 10e-6  # of a request in a decode step: sampling, metadata
BLOCK_S = 50e-6  # of the launch of a block of layers
SWITCH_S = 100e-6  # MuxWise: microseconds; both lanes wait for each other
GUARD = 1.1

DECODE_BESIDE = Contention(demand=0.3, shared=0.1, share=1.0)
PREFILL_BESIDE = Contention(neighbour=0.05, shared=0.1, share=1.0)


@dataclass(frozen=True, slots=True)
class Gpu:
    """Peak rates of the whole of it."""

    name: str
    units: int  # streaming multiprocessors
    part: int  # a split gives each lane a multiple of so many of them, but for the rest
    flop_per_s: float  # bfloat16, dense
    bytes_per_s: float
    memory_bytes: float
    link_bytes_per_s: float  # of a transfer to another node's
    decode_slower: tuple[tuple[int, float], ...]  # (units, how many times as long a decode step takes), ascending


@dataclass(frozen=True, slots=True)
class GpuModel:
    """A dense decoder in bfloat16 on one GPU."""

    name: str
    parameters: float  # of its layers
    vocabulary: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int


H200 = Gpu(
    *("H200 SXM", 132, 16, 989e12, 4.8e12, 141e9, 50e9),
    ((8, 3.79), (16, 2.13), (24, 1.66), (32, 1.42), (48, 1.23), (64, 1.10), (96, 1.04), (132, 1.0)),
)
H100 = Gpu("H100 SXM", H200.units, H200.part, H200.flop_per_s, 3.35e12, 80e9, H200.link_bytes_per_s, H200.decode_slower)
A100 = Gpu(
    *("A100 SXM 80 GB", 108, 16, 312e12, 2.04e12, 80e9, 25e9),
    ((8, 3.41), (16, 2.04), (32, 1.34), (64, 1.06), (104, 1.0), (108, 1.0)),
)
LLAMA_8B = GpuModel("Llama-3.1-8B", 6.98e9, 128_256, 32, 4096, 32, 8, 128, 131_072)
CODE_LLAMA_34B = GpuModel("CodeLlama-34B", 33.22e9, 32_000, 48, 8192, 64, 8, 128, 16_384)
GPUS = {"H200": H200, "H100": H100, "A100": A100}
SHAPES = {"llama-8b": LLAMA_8B, "codellama-34b": CODE_LLAMA_34B}

_DTYPE_BYTES = 2
_MEMORY_USED = 0.9  # what servers leave free for activations is their default
_LEVELS = 4  # units between two levels of a lane's terms


def device_model(gpu: Gpu, model: GpuModel, page_size: int = 16) -> DeviceModel:
    """An instance's device: this model on this GPU."""
    page = KVLayout(model.layers, 1, model.kv_heads, page_size, model.head_dim, _DTYPE_BYTES)
    weights = (model.parameters + 2 * model.vocabulary * model.hidden) * _DTYPE_BYTES
    return DeviceModel(
        name=f"{model.name} on {gpu.name}",
        costs=FittedCosts(parameters(gpu, model)),
        layout=page.filling(gpu.memory_bytes * _MEMORY_USED - weights),
        units=gpu.units,
        splits=tuple(Split(gpu.units - units, units) for units in range(gpu.part, gpu.units - gpu.part + 1, gpu.part)),
        link_bytes_per_s=gpu.link_bytes_per_s,
    )


def parameters(gpu: Gpu, model: GpuModel) -> Parameters:
    """What a profile of it would hold."""
    times = _Times(gpu, model)
    levels = tuple(range(_LEVELS, gpu.units + 1, _LEVELS))
    mixed = [STEP_S + times.token_values(gpu.units)[0], times.own_s, times.reused_s, 0.0, times.context_s, ROW_S]
    return Parameters(
        layers=model.layers,
        units=gpu.units,
        switch_s=SWITCH_S,
        bandwidth=tuple((units, gpu.bytes_per_s / slower) for units, slower in gpu.decode_slower),
        decode=LaneModel(levels, STEP_S, tuple(map(times.decode, levels)), DECODE_BESIDE),
        prefill=LaneModel(levels, BLOCK_S, tuple(map(times.prefill, levels)), PREFILL_BESIDE),
        mixed=(*mixed, *times.token_slopes(gpu.units)),
        guards=dict.fromkeys(("decode", "prefill", "mixed"), (GUARD,) * (len(SIZES_S) + 1)),
    )


class _Times:
    """Seconds of the whole model; alone."""

    def __init__(self, gpu: Gpu, model: GpuModel) -> None:
        self._gpu, self._layers = gpu, model.layers
        read = (model.parameters + model.vocabulary * model.hidden) * _DTYPE_BYTES
        pair_flop = 4 * model.heads * model.head_dim * model.layers
        kv_bytes = model.layers * 2 * model.kv_heads * model.head_dim * _DTYPE_BYTES
        self._weights_s = read / (gpu.bytes_per_s * WEIGHTS_EFFICIENCY)
        self._token_s = 2 * model.parameters / (gpu.flop_per_s * COMPUTE_EFFICIENCY)
        self.context_s = kv_bytes / (gpu.bytes_per_s * CONTEXT_EFFICIENCY)
        self.own_s = pair_flop / (gpu.flop_per_s * OWN_EFFICIENCY)
        self.reused_s = pair_flop / (gpu.flop_per_s * REUSED_EFFICIENCY)

    def decode(self, units: int) -> tuple[float, ...]:
        """Aligned with `features.DECODE`."""
        slower = self._slower(units)
        return (self._weights_s * slower, self.context_s * slower, *(ROW_S * slower,) * len(BATCH_KNOTS))

    def prefill(self, units: int) -> tuple[float, ...]:
        """Aligned with `features.PREFILL`: of a layer. What reads weights reads those of the output head, too."""
        share = self._gpu.units / units / self._layers
        layer = (self.token_values(units)[0] + STEP_S) / self._layers
        slopes = (slope / self._layers for slope in self.token_slopes(units))
        return (layer, self.own_s * share, self.reused_s * share, 0.0, 0.0, *slopes, 0.0)

    def token_values(self, units: int) -> list[float]:
        """At each of `TOKEN_KNOTS`: reading weights, or computing so many tokens, whichever is longer."""
        read_s, token_s = self._weights_s * self._slower(units), self._token_s * self._gpu.units / units
        return [max(read_s, token_s * tokens) for tokens in TOKEN_KNOTS]

    def token_slopes(self, units: int) -> list[float]:
        """Between the knots, and after the last one."""
        at = zip(TOKEN_KNOTS, self.token_values(units), strict=True)
        slopes = [(after - before) / (high - low) for (low, before), (high, after) in pairwise(at)]
        return [*slopes, self._token_s * self._gpu.units / units]

    def _slower(self, units: int) -> float:
        """Interpolated as speeds, which units add to."""
        table = [(at, 1 / slower) for at, slower in self._gpu.decode_slower]
        return 1 / bandwidth_at(table, units)
