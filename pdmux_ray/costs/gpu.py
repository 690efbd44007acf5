"""How long steps take on a GPU that nobody has at hand: a `CostModel` from published figures, of the shape of a profile.

    weights_s = bytes of weights / bandwidth            a step reads all of them once
    context_s = bytes of a token's KV / KV bandwidth    a decode reads its context's
    token_s   = 2 * parameters / compute rate           a prefill computes a token
    pair_s    = 4 * heads * head_dim * layers / attention rate     and its attention to another

A prefill takes the longer one of reading weights and computing. Rates are of the whole GPU; `sm_share.py` has what a part of
one does. A group of N GPUs (tensor parallel) has N times the rates and the memory, and sums twice in each layer what all of
them computed (Megatron-LM, arXiv:1909.08053): a ring sends 2 (N - 1) / N of the hidden states' bytes through each link.

Where the figures are from:
- Rates of a `Gpu`: the vendor's, times the efficiencies below.
- The efficiencies follow from step times of Llama-3.1-8B (bfloat16, TP 1, vLLM) on an H200 in the measured database of
  aiconfigurator 0.12: prefill of 1,024 tokens 21.2 ms, of 4,096 92.8 ms, of 4,096 after 4,096 106.8 ms; decode of 1 request
  4.86 ms, of 32 6.32 ms, of 128 9.94 ms with a context of 1,024, of 32 with 8,192 13.4 ms. Not fitted to anything else.
- An H100 is an H200 with its own memory: the same chip; an A800 an A100 whose NVLink has 400 GB/s in both directions together.
- `decode_slower`: decode step times by SM in the predictor tables that the authors of PD multiplexing (MuxWise,
  arXiv:2504.14489) published: an H800, batch 32, 64K tokens; an A100, 8B. Nobody published a B200's: its share of SMs is taken
  to draw what it does on an H800.
- Shapes are those of the models' config.json; OPT-175B's is that of its paper (arXiv:2205.01068).
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.layout import KVLayout
from pdmux_ray.costs.device import DeviceModel
from pdmux_ray.costs.sm_share import Assumptions, Ramp, WholeTimes, parameters_of
from pdmux_ray.errors import ConfigError
from pdmux_ray.latency.features import BATCH_KNOTS, TOKEN_KNOTS
from pdmux_ray.latency.model import FittedCosts, Parameters
from pdmux_ray.policy.views import CostModel
from pdmux_ray.types import Split

WEIGHTS_EFFICIENCY = 0.8  # of the bandwidth, reading weights: aiconfigurator's own figure
CONTEXT_EFFICIENCY = 0.885  # reading KV
COMPUTE_EFFICIENCY = 0.75  # of the peak, in matrix products
OWN_EFFICIENCY = 0.303  # attention to tokens of the same prefill
REUSED_EFFICIENCY = 0.64  # and to those before it
STEP_S = 0.95e-3  # of a step, whatever it does, on the GPU; what it waits for the host is `Assumptions.host_s`
ROW_S = 10e-6  # of a request in a decode step: sampling, metadata
BLOCK_S = 50e-6  # of the launch of a block of layers

ASSUMED = Assumptions()


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
    peer_bytes_per_s: float  # to one in the same node, in one direction
    decode_slower: tuple[tuple[int, float], ...]  # (units, how many times as long a decode step takes), ascending


@dataclass(frozen=True, slots=True)
class GpuModel:
    """A dense decoder in bfloat16."""

    name: str
    hub: str  # where its weights are
    parameters: float  # of its layers
    vocabulary: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int
    tied: bool = False  # the output head is the input embeddings
    served: bool = True  # by this project's servers

    @property
    def weight_bytes(self) -> float:
        return (self.parameters + (1 if self.tied else 2) * self.vocabulary * self.hidden) * _DTYPE_BYTES

    @property
    def kv_bytes_per_token(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * _DTYPE_BYTES


_DTYPE_BYTES = 2
_MEMORY_USED = 0.9  # what servers leave free for activations is their default
_H800_SLOWER = ((8, 3.79), (16, 2.13), (24, 1.66), (32, 1.42), (48, 1.23), (64, 1.10), (96, 1.04), (132, 1.0))
_A100_SLOWER = ((8, 3.41), (16, 2.04), (32, 1.34), (64, 1.06), (104, 1.0), (108, 1.0))
_B200_SLOWER = tuple((round(units * 148 / 132), slower) for units, slower in _H800_SLOWER)

H200 = Gpu("H200 SXM", 132, 16, 989e12, 4.8e12, 141e9, 50e9, 450e9, _H800_SLOWER)
H100 = Gpu("H100 SXM", 132, 16, 989e12, 3.35e12, 80e9, 50e9, 450e9, _H800_SLOWER)
B200 = Gpu("B200 SXM", 148, 16, 2250e12, 8e12, 180e9, 50e9, 900e9, _B200_SLOWER)
A100 = Gpu("A100 SXM 80 GB", 108, 16, 312e12, 2.04e12, 80e9, 25e9, 300e9, _A100_SLOWER)
A800 = Gpu("A800 SXM 80 GB", 108, 16, 312e12, 2.04e12, 80e9, 25e9, 200e9, _A100_SLOWER)
GPUS = {"H200": H200, "H100": H100, "B200": B200, "A100": A100, "A800": A800}

LLAMA_8B = GpuModel("Llama-3.1-8B", "meta-llama/Llama-3.1-8B", 6.98e9, 128_256, 32, 4096, 32, 8, 128, 131_072)
LLAMA_70B = GpuModel("Llama-3.1-70B", "meta-llama/Llama-3.1-70B", 68.45e9, 128_256, 80, 8192, 64, 8, 128, 131_072)
CODE_LLAMA_34B = GpuModel("CodeLlama-34B", "codellama/CodeLlama-34b-hf", 33.22e9, 32_000, 48, 8192, 64, 8, 128, 16_384)
QWEN3_32B = GpuModel("Qwen3-32B", "Qwen/Qwen3-32B", 31.21e9, 151_936, 64, 5120, 64, 8, 128, 40_960)
OPT_13B = GpuModel("OPT-13B", "facebook/opt-13b", 12.58e9, 50_272, 40, 5120, 40, 40, 128, 2048, tied=True, served=False)
OPT_66B = GpuModel("OPT-66B", "facebook/opt-66b", 65.23e9, 50_272, 64, 9216, 72, 72, 128, 2048, tied=True, served=False)
OPT_175B = GpuModel("OPT-175B", "facebook/opt-175b", 173.95e9, 50_272, 96, 12_288, 96, 96, 128, 2048, tied=True, served=False)
SHAPES = {
    "llama-8b": LLAMA_8B,
    "llama-70b": LLAMA_70B,
    "codellama-34b": CODE_LLAMA_34B,
    "qwen3-32b": QWEN3_32B,
    "opt-13b": OPT_13B,
    "opt-66b": OPT_66B,
    "opt-175b": OPT_175B,
}


def device_model(gpu: Gpu, model: GpuModel, page_size: int = 16, *, tp: int = 1, assume: Assumptions = ASSUMED) -> DeviceModel:
    """An instance's device: this model on a group of `tp` such GPUs. Raises ConfigError."""
    return device_with(FittedCosts(parameters(gpu, model, tp=tp, assume=assume)), gpu, model, page_size, tp=tp, assume=assume)


def device_with(
    costs: CostModel, gpu: Gpu, model: GpuModel, page_size: int, *, tp: int, assume: Assumptions = ASSUMED
) -> DeviceModel:
    """With step times from anywhere. Where there are more GPUs than KV heads, several hold the same. Raises ConfigError."""
    check_group(model, tp)
    page = KVLayout(model.layers, 1, model.kv_heads, page_size, model.head_dim, _DTYPE_BYTES)
    copies = max(tp // model.kv_heads, 1)
    return DeviceModel(
        name=f"{model.name} on {f'{tp} x ' if tp > 1 else ''}{gpu.name}",
        costs=costs,
        layout=page.filling(max(tp * gpu.memory_bytes * _MEMORY_USED - model.weight_bytes, 0.0) / copies),
        units=gpu.units,
        splits=tuple(Split(gpu.units - units, units) for units in range(gpu.part, gpu.units - gpu.part + 1, gpu.part)),
        link_bytes_per_s=gpu.link_bytes_per_s * tp * assume.link,
    )


def check_group(model: GpuModel, tp: int) -> None:
    """Raises ConfigError when the model's heads cannot be shared out to so many GPUs."""
    if tp < 1 or model.heads % tp or (model.kv_heads % tp and tp % model.kv_heads):
        raise ConfigError(f"{model.name} has {model.heads} heads, {model.kv_heads} of KV: {tp} GPUs cannot share them out.")


def parameters(gpu: Gpu, model: GpuModel, *, tp: int = 1, assume: Assumptions = ASSUMED) -> Parameters:
    """What a profile of it would hold. Raises ConfigError."""
    check_group(model, tp)
    read_s = (model.parameters + model.vocabulary * model.hidden) * _DTYPE_BYTES / (gpu.bytes_per_s * tp * WEIGHTS_EFFICIENCY)
    flop_per_s = gpu.flop_per_s * tp
    token_s = 2 * model.parameters / (flop_per_s * COMPUTE_EFFICIENCY)
    pair_flop = 4 * model.heads * model.head_dim * model.layers
    sums = 2 * model.layers if tp > 1 else 0
    sent_s = 2 * (tp - 1) / tp * model.hidden * _DTYPE_BYTES / (gpu.peer_bytes_per_s * assume.allreduce_efficiency)
    times = WholeTimes(
        step_s=STEP_S,
        block_s=BLOCK_S,
        rows=Ramp.line(BATCH_KNOTS, read_s, ROW_S),
        context_s=model.kv_bytes_per_token / (gpu.bytes_per_s * min(tp, model.kv_heads) * CONTEXT_EFFICIENCY),
        pass_row_s=ROW_S,
        tokens=Ramp(TOKEN_KNOTS, tuple(max(read_s, token_s * tokens) for tokens in TOKEN_KNOTS), token_s),
        own_s=pair_flop / (flop_per_s * OWN_EFFICIENCY),
        reused_s=pair_flop / (flop_per_s * REUSED_EFFICIENCY),
        exchange_rows=Ramp.line(BATCH_KNOTS, sums * assume.allreduce_s, sums * sent_s),
        exchange_tokens=Ramp.line(TOKEN_KNOTS, sums * assume.allreduce_s, sums * sent_s),
    )
    return parameters_of(times, model.layers, gpu.units, gpu.decode_slower, gpu.bytes_per_s, assume)
