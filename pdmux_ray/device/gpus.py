"""Whether this machine has an NVIDIA GPU: asked before anything of CUDA is loaded. Linux. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from pdmux_ray.config import EngineConfig
from pdmux_ray.errors import CudaUnavailableError

_DEVICES = Path("/dev")


def has_gpu(devices: Path = _DEVICES) -> bool:
    """By the driver's device files, which containers without a GPU lack."""
    return any(devices.glob("nvidia[0-9]*"))


def wants_gpu(config: EngineConfig) -> bool:
    """Whether an instance of this machine is to be given a GPU."""
    return config.device == "cuda" or (config.device == "auto" and has_gpu())


def require_gpu(config: EngineConfig, devices: Path = _DEVICES) -> None:
    """Of a server on this machine. Raises CudaUnavailableError when it is to have a GPU that is not there."""
    if config.device == "cuda" and not has_gpu(devices):
        raise CudaUnavailableError("engine.device: cuda needs an NVIDIA GPU and its driver, and this machine has none.")
