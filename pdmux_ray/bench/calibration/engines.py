"""The step times of measured rows: engines of aiconfigurator as rows name them, and its own estimates of those rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.resources import files
from typing import Any, TypeVar

from pdmux_ray.bench.calibration.rows import Group, Row, UncostedError, plain_name
from pdmux_ray.costs.silicon import check_installed, compiled

Found = TypeVar("Found")

GRAIN = 64  # tokens, to which contexts and passes are rounded
MEMORY = {"vllm": "of_total", "sglang": "of_total", "trtllm": "of_free"}  # what a framework's share of it is a share of
PASS_TOKENS = 8192
RAW_TTFT, RAW_TPOT = 1.8, 1.08  # what aiconfigurator multiplies steps of engines that do one phase by
PROBE = 1024  # tokens: a variant that has no times of such a prompt is none


@dataclass(frozen=True, slots=True)
class Served:
    """What an engine is compiled from. `gemm`, `moe`: the precision of matrix products, as aiconfigurator names it."""

    path: str
    system: str
    framework: str
    group: Group
    gemm: str
    moe: str


@dataclass(frozen=True, slots=True)
class Engine:
    """A compiled one, and with which precisions the database has it."""

    handle: Any
    arguments: dict[str, Any]


@cache
def engine(served: Served) -> Engine:
    """The first of `_variants` that the database has. Raises UncostedError."""
    why = UncostedError("")
    for precisions in _variants(served):
        try:
            return _tried(partial(_engine, served, precisions))
        except UncostedError as error:
            why = why if str(why) else error
    raise why


def _engine(served: Served, precisions: dict[str, str]) -> Engine:
    group = served.group
    arguments = {"tp_size": group.tp, "attention_dp_size": group.dp, "moe_tp_size": group.moe_tp, "moe_ep_size": group.moe_ep}
    handle = compiled(served.path, served.system, served.framework, **arguments, **precisions)
    handle.decode_step_latency(1, PROBE, 2)
    handle.predict_prefill_latency(1, PROBE, 0)
    return Engine(handle, {**arguments, **precisions})


def _variants(served: Served) -> list[dict[str, str]]:
    """As the row says; with attention in bfloat16; with FP8 in blocks, which is how MoE models are published; as the model's
    config.json says. Dense models in FP8 have scales that are known beforehand."""
    gemm = "fp8_static" if served.gemm == "fp8" and not facts(served.path).moe else served.gemm
    told = {key: value for key, value in (("gemm_quant_mode", gemm), ("moe_quant_mode", served.moe)) if value}
    blocks = {key: "fp8_block" if value == "fp8" else value for key, value in told.items()}
    plain = {"fmha_quant_mode": "bfloat16"}
    return [told, {**told, **plain}, {**blocks, **plain}, {}, plain]


@dataclass(frozen=True, slots=True)
class Facts:
    layers: int
    moe: bool


@cache
def facts(path: str) -> Facts:
    """Raises UncostedError."""
    from aiconfigurator_core.sdk.models import check_is_moe
    from aiconfigurator_core.sdk.utils import get_model_config_from_model_path

    return _tried(lambda: Facts(int(get_model_config_from_model_path(path)["layers"]), bool(check_is_moe(path))))


class Kernels:
    """What a compiled engine says of its kernels alone, in seconds, each shape asked once. Raises UncostedError."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.decode_s = cache(self._decode_s)
        self.pass_s = cache(self._pass_s)

    def _decode_s(self, batch: int, context: int) -> float:
        return _tried(partial(self._decode_ms, batch, context)) / 1e3

    def _decode_ms(self, batch: int, context: int) -> float:
        return float(self._handle.decode_step_latency(batch, context, 2))

    def _pass_s(self, new: int, prompt: int, batch: int, context: int) -> float:
        return _tried(partial(self._pass_ms, new, prompt, batch, context)) / 1e3

    def _pass_ms(self, new: int, prompt: int, batch: int, context: int) -> float:
        """aiconfigurator takes a decode's context to be its prompt and half of its answer."""
        if batch:
            return float(self._handle.mixed_step_latency(new, batch, prompt, max(2 * (context - prompt), 2)))
        prompts = max(new // prompt, 1)
        return float(self._handle.predict_prefill_latency(prompts, new // prompts, 0))


@cache
def kernels(served: Served) -> Kernels:
    """Raises UncostedError."""
    return Kernels(engine(served).handle)


@dataclass(frozen=True, slots=True)
class Added:
    """What a framework takes besides its kernels, and of memory, which the database does not know. Seconds and factors; by
    default nothing, and what is the frameworks' default."""

    memory: float = 0.9  # of the GPU's that it uses (TensorRT-LLM: of what the weights leave)
    reserved: float = 1.0  # of an answer's KV, when a request is admitted
    layer_s: float = 0.0  # of the host, of a layer of a pass with prompts, whose kernels it launches one by one: the least time
    pass_s: float = 0.0  # of the host, on top of such a pass
    passes: float = 1.0  # times what the kernels of such a pass take
    step_s: float = 0.0  # of the host, on top of a decode step
    steps: float = 1.0  # times what a decode step's kernels take
    short: float = 0.0  # of its places for requests, how many fewer it has than there are clients
    accept_s: float = 0.0  # of its front for a request, one after the other
    first_s: float = 0.0  # of a first token, besides: nobody else waits for that


NOTHING = Added()


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """A `StepTimes` of kernels, with what is added. Raises UncostedError."""

    kernels: Kernels
    layers: int
    added: Added

    def decode_s(self, batch: int, context: int) -> float:
        return self.added.step_s + self.added.steps * self.kernels.decode_s(batch, max(context // GRAIN * GRAIN, 1))

    def pass_s(self, new: int, prompt: int, batch: int, context: int) -> float:
        seconds = self.kernels.pass_s(max(new // GRAIN * GRAIN, 1), prompt, batch, context // GRAIN * GRAIN)
        return self.added.pass_s + max(self.layers * self.added.layer_s, self.added.passes * seconds)


@dataclass(frozen=True, slots=True)
class Kv:
    """Of a rank: tokens that its pool holds, and a token's bytes on each of its GPUs."""

    tokens: float
    token_bytes: float


@cache
def kv(served: Served, share: float) -> Kv:
    """With so much of the memory. Raises UncostedError."""
    from aiconfigurator_core.sdk.memory import estimate_kv_cache

    found = _tried(
        lambda: estimate_kv_cache(
            *(served.path, served.system, served.framework, "current"),
            max_num_tokens=PASS_TOKENS,
            max_batch_size=256,
            memory_fraction_kind=MEMORY[served.framework],
            memory_fraction_value=share,
            **engine(served).arguments,
        )
    )
    return Kv(float(found["total_kv_size_tokens"]), float(found["kv_size_per_token_bytes"]))


@cache
def link_bytes_per_s(system: str) -> float:
    """Of a GPU to another node's, in one direction, as aiconfigurator describes the system. Raises UncostedError."""
    from aiconfigurator_core.sdk.perf_database import load_system_spec

    return _tried(lambda: float(load_system_spec(system)["node"]["inter_node_bw"]))


def raw_apart(prefill: Served, decode: Served, batch: int, prompt: int, output: int) -> tuple[float, float]:
    """aiconfigurator's own estimate of TTFT and TPOT, in seconds, of engines that do one phase. Raises UncostedError."""
    return _tried(
        lambda: (
            RAW_TTFT * float(engine(prefill).handle.predict_prefill_latency(1, prompt, 0)) / 1e3,
            RAW_TPOT * float(engine(decode).handle.decode_step_latency(batch, prompt, output)) / 1e3,
        )
    )


def raw_together(served: Served, batch: int, prompt: int, output: int) -> tuple[float, float]:
    """aiconfigurator's own estimate of TTFT and TPOT, in seconds: passes of one prompt. Raises UncostedError."""
    return _tried(partial(_raw_together, served, batch, prompt, output))


def _raw_together(served: Served, batch: int, prompt: int, output: int) -> tuple[float, float]:
    from aiconfigurator_core.sdk.config import RuntimeConfig

    backend, model, database = _planner(served)
    runtime = RuntimeConfig(batch_size=batch, isl=prompt, osl=output)
    found = backend.run_agg(model, database, runtime, ctx_tokens=prompt).get_result_dict()
    return float(found["ttft"]) / 1e3, float(found["tpot"]) / 1e3


@cache
def _planner(served: Served) -> tuple[Any, Any, Any]:
    from aiconfigurator_core.sdk.backends.factory import get_backend
    from aiconfigurator_core.sdk.config_builders import build_model_config
    from aiconfigurator_core.sdk.models import get_model
    from aiconfigurator_core.sdk.perf_database import get_database

    config = build_model_config(pp_size=1, **engine(served).arguments)
    model = get_model(served.path, config, served.framework)
    return get_backend(served.framework), model, get_database(served.system, served.framework, "current")


def _tried(call: Callable[[], Found]) -> Found:
    try:
        return call()
    except UncostedError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of its Rust
            raise
        text = (str(error).splitlines() or [""])[0].partition(" at /")[0][:110]
        raise UncostedError(f"aiconfigurator: {type(error).__name__}: {text}") from None


@cache
def shapes() -> dict[str, str]:
    """The models whose config.json aiconfigurator brings and reads there, by their plain names: of others it asks a hub. Raises
    ConfigError when it is not installed."""
    check_installed()
    from aiconfigurator_core.sdk.common import DefaultHFModels

    suffix, names = "_config.json", dict[str, str]()
    for file in files("aiconfigurator_core").joinpath("model_configs").iterdir():
        if file.name.endswith(suffix) and "_hf_quant" not in file.name:
            path = file.name.removesuffix(suffix).replace("--", "/")
            plain = plain_name(path)
            if path in DefaultHFModels and (plain not in names or len(path) < len(names[plain])):
                names[plain] = path
    return names


def served(row: Row, group: Group) -> Served:
    """Raises UncostedError when nobody here knows the model's shape: none is fetched."""
    path = shapes().get(plain_name(row.model))
    if path is None:
        raise UncostedError(f"the shape of {row.model} is not known")
    if row.framework not in MEMORY:
        raise UncostedError(f"how {row.framework} serves is not known")
    if facts(path).moe and group.moe_tp * group.moe_ep == 1:  # not told
        group = replace(group, moe_tp=group.tp, moe_ep=group.dp)
    return Served(path, row.system, row.framework, group, row.gemm, row.moe)
