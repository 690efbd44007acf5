"""libcuda.c, built and loaded by the real cuda-bindings: in other processes, because a process looks for libcuda once."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdmux_ray.device.cuda.green_context import Partition

HERE = Path(__file__).parent
# Drivers: each has less than the one before. The third states no granularity, the last makes no streams of green contexts.
STRUCTURED, BY_COUNT, UNSTATED, OLDEST = 13_010, 13_000, 12_080, 12_040


@dataclass(frozen=True)
class Lane:
    """A partition, and what the stand-in says of its stream."""

    partition: Partition
    sms: frozenset[int]
    priority: int


@dataclass(frozen=True)
class Made:
    """What `make_partitions` made. `log`: what the stand-in was asked to make, in order; `logged`: what the module logged."""

    resource: dict[str, int]
    splits: list[tuple[int, int]]
    whole: Lane
    lanes: list[tuple[Lane, Lane]]  # prefill and decode of each split
    structured: bool
    warnings: list[str]
    logged: list[str]
    log: list[str]
    context_kept: bool  # the thread's current context is what it was before

    def logged_as(self, start: str) -> list[str]:
        return [line.removeprefix(start).strip() for line in self.log if line.startswith(start)]


class StandIn:
    """One process for each driver version. Other keywords of a device are the stand-in's: `sms=132` is STAND_IN_SMS."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._log = folder, folder / "log"
        self._processes: dict[int, subprocess.Popen[str]] = {}
        compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or "cc"
        flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
        subprocess.run([compiler, *flags, str(HERE / "libcuda.c"), "-o", str(folder / "libcuda.so.1")], check=True)

    def made(self, asked: list[tuple[int, int]] | None = None, driver: int = STRUCTURED, **device: Any) -> Made:
        return self._read(self.ask("partitions", driver, asked=asked, **device))

    def made_without(self, call: str, asked: list[tuple[int, int]], driver: int = STRUCTURED) -> Made:
        """By bindings that do not have that call."""
        return self._read(self.ask("partitions_without", driver, call=call, asked=asked))

    def _read(self, answer: dict[str, Any]) -> Made:
        assert "error" not in answer, answer["error"]
        streams = dict(map(_stream, (line for line in answer["log"] if line.startswith("stream "))))

        def lane(fields: list[int]) -> Lane:
            partition = Partition(*fields)
            return Lane(partition, *streams[partition.stream])

        answer["whole"] = lane(answer["whole"])
        answer["lanes"] = [(lane(prefill), lane(decode)) for prefill, decode in answer["lanes"]]
        answer["splits"] = [(prefill, decode) for prefill, decode in answer["splits"]]
        return Made(**answer)

    def error(self, asked: list[tuple[int, int]] | None = None, driver: int = STRUCTURED, **device: Any) -> str:
        """Class and message of what `make_partitions` raises."""
        return str(self.ask("partitions", driver, asked=asked, **device)["error"])

    def ask(self, job: str, driver: int = STRUCTURED, **arguments: Any) -> Any:
        """What a function of stand_in_jobs.py returns. Arguments that it does not take itself are environment variables."""
        process = self._processes.get(driver)
        if process is None:
            process = self._processes[driver] = self.start(self.folder, STAND_IN_DRIVER=str(driver))
        return _ask(process, job, {**arguments, "log": str(self._log)})

    @staticmethod
    def start(folder: Path, **environment: str) -> subprocess.Popen[str]:
        """A process that looks for libcuda in `folder` first."""
        inherited = {k: v for k, v in os.environ.items() if k not in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS")}
        return subprocess.Popen(
            [sys.executable, str(HERE / "stand_in_jobs.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**inherited, "PYTHONPATH": str(HERE.parents[2]), "LD_LIBRARY_PATH": str(folder), **environment},
        )

    def without_library(self, folder: Path) -> str:
        """The error of a process that cannot load libcuda, wherever else on this machine there is one."""
        (folder / "libcuda.so.1").touch()
        process = self.start(folder)
        try:
            return str(_ask(process, "partitions", {"asked": None, "log": str(folder / "log")})["error"])
        finally:
            _end(process)

    def close(self) -> None:
        for process in self._processes.values():
            _end(process)


def _ask(process: subprocess.Popen[str], job: str, arguments: dict[str, Any]) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps([job, arguments]) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    assert line, "the process ended"
    return json.loads(line)


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.ExitStack() as closing:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                closing.enter_context(pipe)
    process.wait()


def _stream(line: str) -> tuple[int, tuple[frozenset[int], int]]:
    """Of `stream ADDRESS context=… priority=… sms=BITS`: the address, (SMs, priority)."""
    _, address, *fields = line.split()
    values = dict(field.split("=") for field in fields)
    bits = int(values["sms"], 16)
    return int(address, 16), (frozenset(sm for sm in range(bits.bit_length()) if bits >> sm & 1), int(values["priority"]))
