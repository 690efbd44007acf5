"""What a profile is of: a model on a device with this software. Another of any of these needs a profile of its own."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict

from pdmux_ray.errors import ConfigError

MEASURE = "Measure here, with every --set that the server has: pdmux profile CONFIG --out FILE"


class ProfileMismatchError(ConfigError):
    """The profile is of something else; the message says what differs."""


class Identity(BaseModel):
    """Equal in every field: the profile fits."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str  # its directory's name, and a hash of its config.json
    device: str  # the processor's name, or the GPU's
    units: int  # cores (or SMs) of it
    dtype: str
    tensor_parallel: int
    page_size: int  # tokens
    torch: str
    kernels: str  # which kind, and a hash of their sources
    settings: str = "not recorded"  # of its threads; older profiles do not tell


@runtime_checkable
class Identified(Protocol):
    """A runner that a profile can be of. One of a GPU has the GPU's name as `processor`, besides."""

    device: str  # "cpu" or "cuda"
    units: int
    page_size: int
    dtype: object  # torch's, or its name
    kernels: str  # which kind it uses, such as "native"
    settings: str  # what else changes its times: how its idle threads wait


def identify(model_dir: Path, runner: Identified) -> Identity:
    """Of this runner on this machine."""
    return Identity(
        model=model_name(model_dir),
        device=getattr(runner, "processor", None) or processor(),
        units=runner.units,
        dtype=str(runner.dtype).removeprefix("torch."),
        tensor_parallel=1,
        page_size=runner.page_size,
        torch=version("torch"),
        kernels=f"{runner.kernels}, {_hash_of_kernels(runner.device)}",
        settings=runner.settings,
    )


def model_name(model_dir: Path) -> str:
    """As an identity has it."""
    config_json = (model_dir / "config.json").read_bytes()
    return f"{model_dir.resolve().name}, config {hashlib.sha256(config_json).hexdigest()[:12]}"


def check(found: Identity, wanted: Identity, where: str, way_out: str = MEASURE) -> None:
    """Raises ProfileMismatchError with each field that differs; `where` the profile lies, and what to do about it."""
    differing = [
        f"  {name}: profiled {getattr(found, name)!r}, here {getattr(wanted, name)!r}"
        for name in Identity.model_fields
        if getattr(found, name) != getattr(wanted, name)
    ]
    if differing:
        raise ProfileMismatchError(f"{where} is a profile of something else:\n" + "\n".join(differing) + f"\n{way_out}")


def processor() -> str:
    """Its name and instruction sets that matter, or at least its architecture."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.machine()
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = set(re.findall(r"\b(?:avx2|avx512f|avx512_bf16|amx_bf16)\b", text))
    return " ".join([name[1] if name else platform.machine(), f"({os.cpu_count()} cores)", *sorted(flags)])


_SOURCES = {"cpu": ("cpu", (".cpp", ".h")), "cuda": ("cuda/kernels", (".py",))}  # device -> folder, endings


def _hash_of_kernels(device: str) -> str:
    """Of the sources that are compiled. Python around them may change: what that costs, the correction in use notices."""
    digest, (where, endings) = hashlib.sha256(), _SOURCES[device]
    folder = files("pdmux_ray.device").joinpath(where)  # its parent is light to import
    for source in sorted((p for p in folder.iterdir() if p.name.endswith(endings)), key=lambda path: path.name):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:12]
