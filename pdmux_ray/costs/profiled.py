"""The device that a profile was measured on: its latencies, units, splits and layers, and an instance's KV pool there.

The pool's shape is the model's (its config.json), its size the configuration's. How far a step's time is from its prediction is
what the profile has found on records that it was not fitted to.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kv_transfer.layout import KVLayout
from pdmux_ray.config import CPU_KV_CACHE_GIB, EngineConfig
from pdmux_ray.costs.device import DeviceModel
from pdmux_ray.errors import ConfigError
from pdmux_ray.latency.identity import Identity, ProfileMismatchError, model_name
from pdmux_ray.latency.profile import Profile, read
from pdmux_ray.latency.records import Quality
from pdmux_ray.model.context import context_length, head_dim
from pdmux_ray.types import Split

_GPU = "NVIDIA"  # how the name of one begins
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MEDIAN_OF_NORMAL = 0.6745  # |x|, for a deviation of 1


@dataclass(frozen=True, slots=True)
class Profiled:
    """What a profile makes known to a simulation."""

    device: DeviceModel
    context_length: int  # of the model
    spread: float  # of step times about their prediction; see `sim.device.CostDevice`


def profiled(path: Path, model_dir: Path, engine: EngineConfig, link_bytes_per_s: float) -> Profiled:
    """Raises ConfigError when the file is no sound profile, or when `engine` or the model is not what was profiled."""
    profile = read(path)
    identity, model = profile.identity, _model(model_dir)
    _check(path, identity, model_dir, engine)
    page = KVLayout(
        profile.parameters.layers,
        1,
        model.num_key_value_heads,
        identity.page_size,
        head_dim(model),
        _DTYPE_BYTES[identity.dtype],
    )
    layout = page.filling(_pool_gib(engine, identity) * 2**30)
    if layout.pages < 1:
        raise ConfigError(f"engine.kv_cache_gib: {engine.kv_cache_gib} does not hold one page; raise it")
    device = DeviceModel(
        name=f"{identity.model.partition(',')[0]} on {identity.device}, as profiled in {path.name}",
        costs=profile.costs(),
        layout=layout,
        units=profile.parameters.units,
        splits=_splits(profile),
        link_bytes_per_s=link_bytes_per_s,
    )
    return Profiled(device, context_length(model), spread(profile.qualities))


def spread(qualities: tuple[Quality, ...]) -> float:
    """The deviation of log(measured / predicted) on held-out records, if it was normal: by the median error, which a few
    records that are far off do not move."""
    samples = [quality.samples for quality in qualities]
    if not sum(samples):
        return 0.0
    return statistics.fmean([quality.median_error for quality in qualities], samples) / _MEDIAN_OF_NORMAL


def _splits(profile: Profile) -> tuple[Split, ...]:
    """The disjoint ones that it measured, fewest decode units first."""
    found = {
        Split(point.beside, point.units) if point.kind == "decode" else Split(point.units, point.beside)
        for point in profile.points
        if point.beside and point.units + point.beside <= profile.parameters.units
    }
    return tuple(sorted(found, key=lambda split: split.decode_units))


def _pool_gib(engine: EngineConfig, identity: Identity) -> float:
    if engine.kv_cache_gib is None and identity.device.startswith(_GPU):
        raise ConfigError(
            "engine.kv_cache_gib is missing: on a GPU the pool is what weights and graphs leave free, and no profile knows "
            "that. Set it to what the server says at its start."
        )
    return engine.kv_cache_gib or CPU_KV_CACHE_GIB


def _check(path: Path, identity: Identity, model_dir: Path, engine: EngineConfig) -> None:
    """What a server would refuse the profile for, as far as it shows without the device."""
    wanted = {
        "model": (identity.model, model_name(model_dir)),
        "units (engine.threads)": (identity.units, engine.threads or identity.units),
        "engine.page_size": (identity.page_size, engine.page_size),
        "engine.dtype": (identity.dtype, identity.dtype if engine.dtype == "auto" else engine.dtype),
    }
    differing = [f"  {name}: profiled {was!r}, configured {now!r}" for name, (was, now) in wanted.items() if was != now]
    if differing:
        text = "\n".join(differing)
        raise ProfileMismatchError(
            f"{path} is a profile of something else:\n{text}\nGive the configuration's own profile (--profile)."
        )


def _model(model_dir: Path) -> Any:
    """Its config.json by attribute, as the library that reads such files has it. Raises ConfigError."""
    path = model_dir / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        raw.setdefault("rope_parameters", raw.get("rope_scaling"))
        raw.setdefault("num_key_value_heads", raw["num_attention_heads"])
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"cannot read {path}: {error!r}. A model is a Hugging Face directory.") from None
    return SimpleNamespace(**raw)
