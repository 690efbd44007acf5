"""Which machine this is, and what it gives: the rates that every other figure is held against."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch

from pdmux_ray.gpu_check.lab import Lab
from pdmux_ray.gpu_check.report import Row

PACKAGES = ("torch", "triton", "transformers", "cuda-bindings", "numpy")


def machine(lab: Lab) -> Iterator[Row]:
    yield Row("Python", platform.python_version())
    for package in PACKAGES:
        yield Row(package, _version(package))
    if lab.streams.device.type == "cuda":
        yield from _gpu(lab.streams.device)
    yield Row("streaming multiprocessors", lab.streams.units, "SMs")
    yield Row("copy bandwidth, read and written", lab.rates.copy_bytes_per_s / 1e9, "GB/s")
    yield Row(f"bf16 product of {lab.sizes.matrix} x {lab.sizes.matrix}", lab.rates.flop_per_s / 1e12, "TFLOP/s")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _gpu(device: torch.device) -> Iterator[Row]:
    from pdmux_ray.device.cuda.driver import dotted, open_driver

    facts = torch.cuda.get_device_properties(device)
    driver = open_driver()
    yield Row("GPU", facts.name)
    yield Row("compute capability", f"{facts.major}.{facts.minor}")
    yield Row("memory", facts.total_memory / 2**30, "GiB")
    yield Row("CUDA of the driver", dotted(driver.version))
    yield Row("CUDA of torch", torch.version.cuda or "none")
    yield Row("splits are structured", "yes" if driver.structured else "no: by count")
