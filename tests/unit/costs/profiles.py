"""A profile that nobody has measured: of a published GPU's parameters."""

from __future__ import annotations

import json
from pathlib import Path

from pdmux_ray.costs.gpu import H200, LLAMA_8B, parameters
from pdmux_ray.latency.identity import Identity, model_name
from pdmux_ray.latency.profile import FORMAT, MeasuredPoint, Probe, Profile
from pdmux_ray.latency.records import Quality

SHAPE = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}


def model(directory: Path, **more: object) -> Path:
    """A model's directory, without weights."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**SHAPE, "max_position_embeddings": 8192, **more}))
    (directory / "tokenizer.json").write_text("{}")
    return directory


def profile(model_dir: Path, device: str = "a formula") -> Profile:
    return Profile(
        format=FORMAT,
        identity=Identity(
            model=model_name(model_dir),
            device=device,
            units=H200.units,
            dtype="bfloat16",
            tensor_parallel=1,
            page_size=16,
            torch="none",
            kernels="none",
        ),
        took_s=1.0,
        disturbed=0.0,
        probe=Probe(units=(1,), bytes_per_s=(1.0,), flop_per_s=(1.0,)),
        parameters=parameters(H200, LLAMA_8B),
        qualities=(_quality("decode on 132", 0.02), _quality("mixed on 132", 0.04)),
        points=(_point("decode", 32, 100), _point("prefill", 68, 64), _point("decode", 132, 68), _point("decode", 132, 0)),
    )


def _quality(part: str, error: float) -> Quality:
    return Quality(part, 1, 10, error, 2 * error, 1.0)


def _point(kind: str, units: int, beside: int) -> MeasuredPoint:
    return MeasuredPoint(
        kind=kind,
        role="fit",
        units=units,
        beside=beside,
        batch=1,
        context_tokens=1,
        pieces=(),
        layers=1,
        last=False,
        samples=1,
        percentiles_s=(1.0,),
        predicted_s=1.0,
        bound_s=1.0,
    )
