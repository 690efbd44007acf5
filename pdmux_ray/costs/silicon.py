"""Step times of GPUs that others measured: of each operation of a model, in the database of `aiconfigurator-core` 0.12.

It has times on all of a GPU, alone, of matrix products, attention, all-reduces and so on, by shape; a step takes their sum.
From it `WholeTimes` takes what the formula of a profile needs, so that a prediction is as quick as one of a profile:

- decode of so many requests: the other operations of as many tokens; attention of one without context (its floor), for each
  token of context what one costs where there are many, and what a batch with 512 tokens each takes besides.
- prefill: the other operations of its tokens, the floor, and for each pair of tokens what one costs in a prompt of 8,192, or of
  2,048 after 32,768; and what attention takes besides in a short prompt.

`sm_share.py` has what follows for a part of the GPU. `tests/cpu/test_silicon.py` says how near this is to the sums.

Not in the database is what the host takes: the launch of a block of layers is `gpu.BLOCK_S`, the rest `Assumptions.host_s`, and
`--slower` is for what one knows better.
An A800 is not in it either: it takes what an A100 does, but for what all-reduces take with their bytes, see `over_link`.
A model that aiconfigurator does not know is described to it as one of Llama's kind with as many weights a layer.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

from pdmux_ray.costs.device import DeviceModel
from pdmux_ray.costs.gpu import ASSUMED, BLOCK_S, GPUS, Gpu, GpuModel, check_group, device_with
from pdmux_ray.costs.sm_share import Assumptions, Ramp, WholeTimes, parameters_of
from pdmux_ray.errors import ConfigError
from pdmux_ray.latency.features import BATCH_KNOTS, TOKEN_KNOTS
from pdmux_ray.latency.model import FittedCosts

SYSTEMS = {"H200": "h200_sxm", "H100": "h100_sxm", "B200": "b200_sxm", "A100": "a100_sxm", "A800": "a100_sxm"}
SAME_CHIP = {"A800": "A100"}  # whose times those are, where the GPUs differ in the link between them only
BACKEND = "vllm"
MANY_TOKENS = 8192  # of one prompt in a pass: the next one only computes, and attention is mostly pairs
REUSED = (2048, 32_768)  # new tokens, and those before them
CONTEXT = (64, 8192)  # requests, and tokens of each
SHORT = 512  # tokens of context, with which a batch's attention takes more than its tokens do
MOST_ROWS = 256  # of a decode batch, up to which the slope after the last knot is taken


def device_model(gpu: Gpu, model: GpuModel, page_size: int = 16, *, tp: int = 1, assume: Assumptions = ASSUMED) -> DeviceModel:
    """As `gpu.device_model`, with measured times. About a second, once a process. Raises ConfigError."""
    key = next((name for name, each in GPUS.items() if each.name == gpu.name), None)
    if key is None:
        raise ConfigError(f"no measured step times of {gpu.name}. Take one of {', '.join(SYSTEMS)}, or --costs roofline.")
    measured_on = GPUS[SAME_CHIP.get(key, key)]
    times = over_link(_measured(gpu, model, SYSTEMS[key], tp), measured_on.peer_bytes_per_s / gpu.peer_bytes_per_s)
    parameters = parameters_of(times, model.layers, gpu.units, gpu.decode_slower, gpu.bytes_per_s, assume)
    return device_with(FittedCosts(parameters), gpu, model, page_size, tp=tp, assume=assume)


def over_link(times: WholeTimes, longer: float) -> WholeTimes:
    """Where the link between the GPUs takes `longer` times as long for a byte. Assumed: the all-reduces of a single token take
    as long on any link, and what those of more tokens take besides is their bytes."""

    def over(ramp: Ramp) -> Ramp:
        least_s = ramp.values_s[0]
        return Ramp(ramp.knots, tuple(least_s + longer * (each_s - least_s) for each_s in ramp.values_s), longer * ramp.after_s)

    return replace(times, exchange_rows=over(times.exchange_rows), exchange_tokens=over(times.exchange_tokens))


@dataclass(frozen=True, slots=True)
class _Parts:
    """Seconds of a pass."""

    attention_s: float
    exchange_s: float
    other_s: float


def whole_times(engine: Any) -> WholeTimes:
    """`engine`: a compiled `EngineHandle`."""
    many, floor_s = _prefill(engine, MANY_TOKENS, 0), _decode(engine, 1, 1).attention_s
    (requests, context), (new, prior) = CONTEXT, REUSED
    context_s = (_decode(engine, requests, context).attention_s - floor_s) / (requests * context)
    own_s = (many.attention_s - floor_s) / _pairs(MANY_TOKENS)
    reused_s = _prefill(engine, new, prior).attention_s - _prefill(engine, new, 0).attention_s
    passes = [(_prefill(engine, max(tokens, 1), 0), own_s * _pairs(tokens)) for tokens in (*TOKEN_KNOTS, MANY_TOKENS)]
    batches = (*BATCH_KNOTS, MOST_ROWS)
    steps = [(_decode(engine, max(rows, 1), SHORT), context_s * SHORT * rows) for rows in batches]
    return WholeTimes(
        step_s=floor_s,
        block_s=BLOCK_S,
        rows=_ramp(batches, [parts.other_s + max(parts.attention_s - floor_s - seen, 0) for parts, seen in steps]),
        context_s=context_s,
        pass_row_s=0.0,
        tokens=_ramp(
            (*TOKEN_KNOTS, MANY_TOKENS), [parts.other_s + max(parts.attention_s - floor_s - seen, 0) for parts, seen in passes]
        ),
        own_s=own_s,
        reused_s=reused_s / (new * prior),
        exchange_rows=_ramp(batches, [parts.exchange_s for parts, _ in steps]),
        exchange_tokens=_ramp((*TOKEN_KNOTS, MANY_TOKENS), [parts.exchange_s for parts, _ in passes]),
    )


def _pairs(tokens: int) -> float:
    return tokens * (tokens + 1) / 2


def _ramp(counts: Sequence[int], seconds: Sequence[float]) -> Ramp:
    """The slope to the last value is that after the knots. That more work takes less time is an accident of a measurement."""
    rising = tuple(accumulate(seconds, max))
    return Ramp(tuple(counts[:-1]), rising[:-1], (rising[-1] - rising[-2]) / (counts[-1] - counts[-2]))


def _prefill(engine: Any, new: int, prior: int) -> _Parts:
    return _parts(engine.run_static_per_op(batch_size=1, isl=new + prior, osl=1, prefix=prior)[0])


def _decode(engine: Any, batch: int, context: int) -> _Parts:
    return _parts(engine.decode_step_per_op(batch, context, 2))


def _parts(operations: list[tuple[str, float, float, str]]) -> _Parts:
    """Of (name, milliseconds, energy, source)."""
    exchange = sum(ms for name, ms, _, _ in operations if name.rpartition("_ar")[1])
    attention = sum(ms for name, ms, _, _ in operations if name.endswith("_attention"))
    return _Parts(attention / 1e3, exchange / 1e3, sum(ms for _, ms, _, _ in operations) / 1e3 - (attention + exchange) / 1e3)


def _measured(gpu: Gpu, model: GpuModel, system: str, tp: int) -> WholeTimes:
    """Raises ConfigError."""
    check_installed()
    check_group(model, tp)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(_config(model)), encoding="utf-8")
        try:
            return whole_times(compiled(directory, system, BACKEND, tp_size=tp))
        except Exception as error:  # of many kinds, by what is missing
            raise ConfigError(f"aiconfigurator has no times of {model.name} on {tp} x {gpu.name}: {error}") from None


def check_installed() -> None:
    """Raises ConfigError."""
    if find_spec("aiconfigurator_core") is None:
        raise ConfigError(
            "aiconfigurator-core is not installed, which silicon costs are from. Install pdmux-ray[silicon], or take roofline."
        )


def compiled(model_path: str, system: str, backend: str, **arguments: Any) -> Any:
    """An `EngineHandle` of aiconfigurator. Raises ConfigError when it is not installed; what it raises for what it has no data
    of."""
    check_installed()
    from aiconfigurator_core.sdk.engine import EngineHandle

    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)  # it warns of tables that dense models have no use for
    return EngineHandle.compile(model_path, system, backend, **arguments)


def _config(model: GpuModel) -> dict[str, Any]:
    """As config.json of a model of Llama's kind: each layer has as many weights."""
    attention = 2 * model.hidden * model.head_dim * (model.heads + model.kv_heads)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "hidden_size": model.hidden,
        "intermediate_size": round((model.parameters / model.layers - attention) / (3 * model.hidden) / 64) * 64,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocabulary,
        "max_position_embeddings": model.context_length,
    }
