"""Every partition of a device that lanes run on, made once.

For each split two green contexts on disjoint SMs, one for either lane, with a stream each; beside them a stream of the primary
context, which has every SM. What a context has is read back from it: the driver may make groups of other sizes than asked.
Contexts and streams live as long as the process, because a stream fails once its context is gone. The primary context stays
current: work goes to a partition by its stream.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any

from pdmux_ray.device.cuda.driver import QUEUES, CudaError, Driver, open_driver
from pdmux_ray.device.cuda.splits import SmResource, decode_is_group, feasible_splits, infeasible, written
from pdmux_ray.types import Split

PAIR = 2  # SMs that every GPU can run one cluster on together
_REFUSALS = (914, 915)  # CUDA_ERROR_INVALID_RESOURCE_TYPE (of nothing), CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION
_MPS_SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Partition:
    """SMs, and a stream whose kernels run on no others. `stream` and `context` are addresses (CUstream, CUcontext)."""

    asked: int  # SMs
    units: int  # SMs that it has
    stream: int
    context: int


@dataclass(frozen=True)
class Partitions:
    """All of a device. `lanes`: of each split, by actual SMs, its partitions for prefill and for decode.

    `structured`: decode's SMs have a guaranteed structure and each lane work queues of its own, where the device has enough.
    `warnings`: what differs from what was asked for; logged already.
    """

    resource: SmResource
    whole: Partition  # every SM, in the primary context
    lanes: dict[Split, tuple[Partition, Partition]]
    structured: bool
    warnings: list[str] = field(default_factory=list)

    @property
    def splits(self) -> tuple[Split, ...]:
        """The disjoint ones, fewest decode units first; empty when the device cannot be divided."""
        return tuple(sorted(self.lanes, key=lambda split: (split.decode_units, split.prefill_units)))

    def prefill(self, split: Split) -> Partition:
        """Raises ValueError when the device was not divided so."""
        if split.prefill_units == self.whole.units:
            return self.whole
        return self.capped(split.prefill_units) if split.decode_units == self.whole.units else self._both(split)[0]

    def decode(self, split: Split) -> Partition:
        """Raises ValueError when the device was not divided so."""
        return self.whole if split.decode_units == self.whole.units else self._both(split)[1]

    def capped(self, prefill_units: int) -> Partition:
        """For a prefill beside decodes on every SM, which overlap it. Raises ValueError when no prefill lane has so many."""
        for split, (prefill, _) in self.lanes.items():
            if split.prefill_units == prefill_units:
                return prefill
        raise ValueError(f"no prefill lane has {prefill_units} SMs; the splits are {written(self.splits)}")

    def _both(self, split: Split) -> tuple[Partition, Partition]:
        if split not in self.lanes:
            raise ValueError(f"the device is not divided {written([split])}; the splits are {written(self.splits)}")
        return self.lanes[split]


def make_partitions(device_index: int = 0, asked: Sequence[tuple[int, int]] | None = None) -> Partitions:
    """Makes all of them. `asked`: (prefill, decode) SMs of each split; None: `feasible_splits` chooses.

    To be called once, after `driver.widen_queues` and `torch.cuda.init`. Raises CudaUnavailableError (no GPU, no driver, too
    old, MIG), ConfigError (a split that is not feasible; the message lists those that are) and CudaError.
    """
    driver = open_driver()
    device = _Device(driver, device_index)
    with driver.current(device.primary):
        partitions = device.divide(asked)
    partitions.warnings.extend(_of_environment())
    for warning in partitions.warnings:
        log.warning("%s", warning)
    log.info(
        "%d SMs, divided %s: prefill/decode %s",
        partitions.whole.units,
        "in structured groups, with work queues of their own" if partitions.structured else "by count",
        written(partitions.splits),
    )
    return partitions


class _Device:
    """A device while it is being divided."""

    def __init__(self, driver: Driver, index: int) -> None:
        self._driver = driver
        self._kinds, self._handle = driver.bindings.CUdevResourceType, driver.device(index)
        # Held for as long as the process lives. First: every green context would else make a primary context, and end it.
        self.primary = driver.call("cuDevicePrimaryCtxRetain", self._handle)
        self._sms = driver.call("cuDeviceGetDevResource", self._handle, self._kinds.CU_DEV_RESOURCE_TYPE_SM)
        self._resource = SmResource(self._sms.sm.smCount, *self._granularity())
        self._queues, self._queue_count = self._own_queues()
        self._warnings: list[str] = []

    def divide(self, asked: Sequence[tuple[int, int]] | None) -> Partitions:
        # Decodes are few, short and awaited: where they share SMs with a capped prefill, theirs go first.
        low, high = self._driver.call("cuCtxGetStreamPriorityRange")
        whole, lanes = self._whole(high), dict[Split, tuple[Partition, Partition]]()
        for split in feasible_splits(self._resource, asked):
            try:
                for_prefill, for_decode = self._cut(split)
                prefill = self._partition(for_prefill, split.prefill_units, low)
                decode = self._partition(for_decode, split.decode_units, high)
            except CudaError as error:
                if error.code not in _REFUSALS:
                    raise
                if asked is not None:
                    raise infeasible(self._resource, [split], f"the driver refuses it: {error}") from error
                self._warnings.append(f"{written([split])} SMs cannot be made: {error}")
                continue
            actual = Split(prefill.units, decode.units)
            if actual != split:
                self._warnings.append(f"{written([split])} SMs were asked for, the driver made {written([actual])}")
            lanes[actual] = prefill, decode
        self._check_queues(2 * len(lanes))
        return Partitions(self._resource, whole, lanes, self._driver.structured, self._warnings)

    def _whole(self, priority: int) -> Partition:
        flags = int(self._driver.bindings.CUstream_flags.CU_STREAM_NON_BLOCKING)
        stream = self._driver.call("cuStreamCreateWithPriority", flags, priority)
        has = self._driver.call("cuCtxGetDevResource", self.primary, self._kinds.CU_DEV_RESOURCE_TYPE_SM)
        return Partition(self._resource.count, has.sm.smCount, int(stream), int(self.primary))

    def _cut(self, split: Split) -> tuple[Any, Any]:
        """The SMs of prefill and of decode."""
        if self._driver.structured:
            decode, prefill = self._structured(split.decode_units)
            return prefill, decode
        grouped = decode_is_group(self._resource, split)
        group, rest = self._driver.split_by_count(self._sms, split.decode_units if grouped else split.prefill_units)
        return (rest, group) if grouped else (group, rest)

    def _structured(self, units: int) -> tuple[Any, Any]:
        """A group of so many SMs, of which as many as possible are together, and the rest."""
        together = gcd(units, self._resource.alignment)
        try:
            return self._driver.split_structured(self._sms, units, together)
        except CudaError as error:
            if error.code not in _REFUSALS or together <= PAIR:
                raise
            # The device has fewer places where so many SMs are together than their number suggests.
            parts = self._driver.split_structured(self._sms, units, PAIR)
            self._warnings.append(f"{units} SMs for decode are together in pairs, not in groups of {together}: {error}")
            return parts

    def _partition(self, sms: Any, asked: int, priority: int) -> Partition:
        """A green context of these SMs and its stream."""
        call = self._driver.call
        resources = [sms] if self._queues is None else [sms, self._queues]
        description = call("cuDevResourceGenerateDesc", resources, len(resources))
        flags = int(self._driver.bindings.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)
        green = call("cuGreenCtxCreate", description, self._handle, flags)
        context = call("cuCtxFromGreenCtx", green)
        stream = self._driver.green_stream(green, priority)
        has = call("cuGreenCtxGetDevResource", green, self._kinds.CU_DEV_RESOURCE_TYPE_SM)
        return Partition(asked, has.sm.smCount, int(stream), int(context))

    def _granularity(self) -> tuple[int, int]:
        """The minimum of a part and the alignment of a group."""
        stated = [getattr(self._sms.sm, name, 0) for name in ("minSmPartitionSize", "smCoscheduledAlignment")]
        if all(stated):
            return stated[0], stated[1]
        # Drivers and bindings before 13.0 do not state them, but they round: the group for one SM is as small as groups are,
        # and that for one SM more is larger by the alignment.
        try:
            least = self._rounded(1)
        except CudaError as error:
            if error.code not in _REFUSALS:
                raise
            return self._sms.sm.smCount, self._sms.sm.smCount  # no group leaves anything: the device cannot be divided
        try:
            return least, self._rounded(least + 1) - least or least
        except CudaError:  # there is no room for a larger one
            return least, least

    def _rounded(self, units: int) -> int:
        group, _ = self._driver.split_by_count(self._sms, units)
        return int(group.sm.smCount)

    def _own_queues(self) -> tuple[Any, int]:
        """The resource that gives a context a work queue that no other one uses, and how many the device has; (None, 0) where
        contexts cannot have any. One for each suffices: of its streams one is used."""
        if not self._driver.structured:
            return None, 0
        queues = self._driver.call("cuDeviceGetDevResource", self._handle, self._kinds.CU_DEV_RESOURCE_TYPE_WORKQUEUE_CONFIG)
        count = queues.wqConfig.wqConcurrencyLimit
        queues.wqConfig.sharingScope = self._driver.bindings.CUdevWorkqueueConfigScope.CU_WORKQUEUE_SCOPE_GREEN_CTX_BALANCED
        queues.wqConfig.wqConcurrencyLimit = 1
        return queues, count

    def _check_queues(self, lanes: int) -> None:
        if self._queues is not None and lanes > self._queue_count:
            self._warnings.append(
                f"{lanes} lanes share {self._queue_count} work queues and may wait for each other: make fewer splits, or set "
                f"CUDA_DEVICE_MAX_CONNECTIONS in the environment, to {QUEUES} at most, before CUDA starts"
            )


def _of_environment() -> list[str]:
    share = os.environ.get(_MPS_SHARE, "100")
    return [] if share == "100" else [f"{_MPS_SHARE} is {share}: with it lanes may use more SMs than they have; unset it"]
