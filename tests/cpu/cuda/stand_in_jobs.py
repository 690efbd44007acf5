"""What is done in a process that has the stand-in of libcuda: a line of JSON is a job, the answer is another one."""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pdmux_ray.device.cuda import green_context
from pdmux_ray.device.cuda.driver import CudaError, open_driver
from pdmux_ray.errors import PdmuxError


def partitions(asked: list[tuple[int, int]] | None, log: Path, index: int = 0) -> dict[str, Any]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(f"{record.levelname}: {record.getMessage()}")  # type: ignore[method-assign]
    green_context.log.addHandler(handler)
    green_context.log.setLevel(logging.INFO)
    try:
        made = green_context.make_partitions(index, asked)
    except PdmuxError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        green_context.log.removeHandler(handler)
    splits = made.splits
    return {
        "resource": dataclasses.asdict(made.resource),
        "splits": [(split.prefill_units, split.decode_units) for split in splits],
        "whole": dataclasses.astuple(made.whole),
        "lanes": [(dataclasses.astuple(made.prefill(split)), dataclasses.astuple(made.decode(split))) for split in splits],
        "structured": made.structured,
        "warnings": made.warnings,
        "logged": messages,
        "log": log.read_text().splitlines(),
        "context_kept": int(_call("cuCtxGetCurrent")) == 0,
    }


def groups_by_count(groups: int, units: int, flags: int, log: Path) -> tuple[list[int], int]:
    """The SMs of each group of the first device, and of the rest."""
    sms = _device_sms()
    parts, made, rest = _call("cuDevSmResourceSplitByCount", groups, sms, flags, units)
    return [part.sm.smCount for part in parts[:made]], rest.sm.smCount


def split_again(log: Path) -> int:
    """The CUresult of dividing a part that no context was made of."""
    bindings = _bindings()
    _, _, rest = _call("cuDevSmResourceSplitByCount", 1, _device_sms(), 0, 8)
    return int(bindings.cuDevSmResourceSplitByCount(1, rest, 0, 8)[0])


def partitions_without(call: str, asked: list[tuple[int, int]], log: Path) -> dict[str, Any]:
    """`partitions` with bindings that do not have that call."""
    bindings = _bindings()
    kept = getattr(bindings, call)
    delattr(bindings, call)
    try:
        return partitions(asked, log)
    finally:
        setattr(bindings, call, kept)


def described_rest(units: int, log: Path) -> int:
    """The CUresult of describing what a group of so many SMs leaves."""
    bindings = _bindings()
    _, _, rest = _call("cuDevSmResourceSplitByCount", 1, _device_sms(), 0, units)
    return int(bindings.cuDevResourceGenerateDesc([rest], 1)[0])


def queries_of_streams(destroy: bool, log: Path) -> list[int]:
    """The CUresult of asking each lane's stream whether it is done, after all that is garbage is collected; `destroy`: and
    after the lanes' contexts were destroyed."""
    made = green_context.make_partitions(0, [(108, 24)])
    gc.collect()
    streams = [_bindings().CUstream(lane.stream) for lanes in made.lanes.values() for lane in lanes]
    if destroy:
        for stream in streams:
            _call("cuGreenCtxDestroy", _call("cuStreamGetGreenCtx", stream))
    return [_query(stream) for stream in streams]


def _query(stream: Any) -> int:
    try:
        open_driver().call("cuStreamQuery", stream)
    except CudaError as error:
        return error.code
    return 0


def _bindings() -> Any:
    from cuda.bindings import driver

    return driver


def _call(name: str, *arguments: Any) -> Any:
    result, *values = getattr(_bindings(), name)(*arguments)
    assert int(result) == 0, (name, result)
    return values[0] if len(values) == 1 else tuple(values)


def _device_sms() -> Any:
    _call("cuInit", 0)
    return _call("cuDeviceGetDevResource", _call("cuDeviceGet", 0), _bindings().CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


OWN = ("asked", "index", "call", "groups", "units", "flags", "destroy")


def main() -> None:
    for line in sys.stdin:
        job, arguments = json.loads(line)
        log = Path(arguments.pop("log"))
        log.unlink(missing_ok=True)
        own = {key: arguments.pop(key) for key in OWN if key in arguments}
        device = {key if key.isupper() else f"STAND_IN_{key.upper()}": str(value) for key, value in arguments.items()}
        with _environment({**device, "STAND_IN_LOG": str(log)}):
            answer = globals()[job](log=log, **own)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
