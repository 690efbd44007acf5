"""The CUDA driver, each of its calls failing with a named error.

Over `cuda.bindings.driver`, which is imported when a driver is opened and finds libcuda by itself. Which calls there are
depends on two versions, the driver's and the bindings'; what only newer ones have is behind `Driver.structured`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pdmux_ray.errors import CudaUnavailableError, PdmuxError

NEEDED = 12_040  # the first version with green contexts; 1000 * major + 10 * minor, as the driver counts
GREEN_STREAMS = 12_050  # the first with cuGreenCtxStreamCreate
STRUCTURED = 13_010  # the first with cuDevSmResourceSplit and work queues of a green context's own
QUEUES = 32  # of the device that streams are spread over; the driver's default is 8

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_NAME_BYTES = 256


class CudaError(PdmuxError):
    """A driver call failed. `call`: its name; `code`: its CUresult."""

    def __init__(self, call: str, result: Any) -> None:
        super().__init__(f"{call} failed with {getattr(result, 'name', 'CUresult')} ({int(result)})")
        self.call, self.code = call, int(result)


class NoDriverError(CudaUnavailableError):
    """libcuda, or the Python package that calls it, is not installed."""


class OldDriverError(CudaUnavailableError):
    """The driver has no green contexts; the message states the version needed and the one found."""


class NoDeviceError(CudaUnavailableError):
    """There is no GPU, or not the one that was asked for."""


class MigDeviceError(CudaUnavailableError):
    """The device is a slice of a GPU in MIG mode."""


def widen_queues() -> None:
    """More hardware queues than the default, unless the environment says. To be called before CUDA starts in this process.

    Streams that share a queue wait for each other's work: a graph replay of one lane for kernels of the other.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", str(QUEUES))


class Driver:
    """The driver of this process. Handles are the bindings' objects; `bindings` is their module.

    `structured`: groups have a guaranteed structure, and contexts work queues of their own; else groups are made by count.
    """

    def __init__(self, bindings: Any) -> None:
        self.bindings = bindings
        self.version: int = self.call("cuDriverGetVersion")
        self.structured = self.version >= STRUCTURED and hasattr(bindings, "cuDevSmResourceSplit")

    def call(self, name: str, *arguments: Any) -> Any:
        """What the call returns beside its CUresult: a value, or a tuple of none or several. Raises CudaError."""
        try:
            result, *values = getattr(self.bindings, name)(*arguments)
        except (KeyError, ValueError) as error:
            if not (unknown := re.match(r"\d+", str(error))):
                raise
            # The bindings are older than the driver and do not know this result: its number is all they say.
            raise CudaError(name, int(unknown[0])) from error
        if int(result):
            raise CudaError(name, result)
        return values[0] if len(values) == 1 else tuple(values)

    @contextmanager
    def current(self, context: Any) -> Iterator[None]:
        """Leaves the thread with the context that it had."""
        self.call("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent")

    def device(self, index: int) -> Any:
        """A CUdevice. Raises NoDeviceError, MigDeviceError."""
        count = self.call("cuDeviceGetCount")
        if index >= count:
            raise NoDeviceError(f"there is no CUDA device {index}: {count} are visible, counted from 0.{_visible()}")
        device = self.call("cuDeviceGet", index)
        name = self.call("cuDeviceGetName", _NAME_BYTES, device).split(b"\0")[0].decode(errors="replace")
        if " MIG " in f"{name} ":  # the driver appends the slice's profile to the GPU's name
            raise MigDeviceError(
                f"CUDA device {index} is {name!r}, a slice of a GPU in MIG mode: lanes are made of a whole GPU. "
                "Switch MIG off (`nvidia-smi -mig 0`) or name another GPU in CUDA_VISIBLE_DEVICES."
            )
        return device

    def green_stream(self, green: Any, priority: int) -> Any:
        """A CUstream whose kernels run on the SMs of a green context. A lower `priority` goes first."""
        flags = int(self.bindings.CUstream_flags.CU_STREAM_NON_BLOCKING)
        if self.version >= GREEN_STREAMS:
            return self.call("cuGreenCtxStreamCreate", green, flags, priority)
        with self.current(self.call("cuCtxFromGreenCtx", green)):
            return self.call("cuStreamCreateWithPriority", flags, priority)

    def split_by_count(self, sms: Any, units: int) -> tuple[Any, Any]:
        """A group of at least `units` of the SMs, as the driver rounds, and the rest. Raises CudaError."""
        groups, made, rest = self.call("cuDevSmResourceSplitByCount", 1, sms, 0, units)
        if not made:
            raise CudaError("cuDevSmResourceSplitByCount", self.bindings.CUresult.CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION)
        return groups[0], rest

    def split_structured(self, sms: Any, units: int, together: int) -> tuple[Any, Any]:
        """A group of `units` SMs of which `together` each can run one cluster, and the rest. Raises CudaError."""
        group = self.bindings.CU_DEV_SM_RESOURCE_GROUP_PARAMS()
        group.smCount, group.coscheduledSmCount = units, together
        try:
            groups, rest = self.call("cuDevSmResourceSplit", 1, sms, 0, [group])
        except TypeError:  # cuda-bindings 13.1 and 13.2 take one group, not a list
            groups, rest = self.call("cuDevSmResourceSplit", 1, sms, 0, group)
        return groups[0], rest


def open_driver() -> Driver:
    """Initialised. Raises CudaUnavailableError, mostly one of those above."""
    widen_queues()
    try:
        from cuda.bindings import driver as bindings
    except ImportError:
        raise NoDriverError("The Python package cuda-bindings is missing: `pip install 'pdmux-ray[cuda]'`.") from None
    try:
        driver = Driver(bindings)
        if driver.version < NEEDED:
            raise OldDriverError(
                f"The NVIDIA driver supports CUDA {dotted(driver.version)}; green contexts need {dotted(NEEDED)}: install "
                "a newer one."
            )
        driver.call("cuInit", 0)
    except CudaError as error:
        if error.code == _NO_DEVICE:
            raise NoDeviceError(f"The NVIDIA driver finds no GPU.{_visible()}") from error
        raise CudaUnavailableError(f"The NVIDIA driver does not start: {error}.") from error
    except RuntimeError as error:  # the bindings', of a class that depends on their version
        raise NoDriverError(f"The NVIDIA driver's library, libcuda.so.1, cannot be loaded: {error}") from error
    return driver


def dotted(version: int) -> str:
    """13010 -> 13.1"""
    return f"{version // 1000}.{version % 1000 // 10}"


def _visible() -> str:
    """What hides devices from this process, if anything does."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if value is None else f" CUDA_VISIBLE_DEVICES is {value!r}."
