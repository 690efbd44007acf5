"""`pdmux timeline URL`: what a server's step loops did lately, as a file for https://ui.perfetto.dev and as a picture. And what
`pdmux bench` takes of it for its reports."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp

from pdmux_ray.bench.load.answer import quoted
from pdmux_ray.bench.load.generator import run as run_loop
from pdmux_ray.bench.load.targets import TargetError, base_url
from pdmux_ray.errors import ConfigError
from pdmux_ray.metrics.lane_units import together
from pdmux_ray.metrics.trace import Trace, arrivals_of, clock_offset_s, slices_of, units_of
from pdmux_ray.report.series import UnitsSample, Window
from pdmux_ray.report.timeline import build, samples_of

PATH = "/debug/timeline"
MAX_S = 60.0  # until everything is there
MARGIN_S = 2.0  # that is asked for before a run: asking takes time, and a block may have begun earlier
MAX_BYTES = 512 * 2**20
MAX_EMPTY_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Fetched:
    """A server's trace. `offset_s` is added to its times to have `time.perf_counter` of this process."""

    trace: Trace
    offset_s: float

    @property
    def instances(self) -> list[str]:
        return list(self.trace["otherData"]["instances"])


def fetch(
    url: str, seconds: float, api_key: str | None = None, instance: str | None = None, patience_s: float = MAX_S
) -> Fetched | None:
    """The last `seconds`; None when the server has none to tell. Raises TargetError, after `patience_s` at the latest."""
    return run_loop(_fetched(url, seconds, api_key, {"instance": instance} if instance else {}, patience_s))


async def _fetched(url: str, seconds: float, api_key: str | None, named: dict[str, str], patience_s: float) -> Fetched | None:
    """A first, empty trace tells how the clocks differ: its answer takes so little time that little can be wrong."""
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    try:
        async with asyncio.timeout(patience_s), aiohttp.ClientSession(headers=headers, auto_decompress=False) as session:
            before_s = time.perf_counter()
            empty = await _get(session, url, {"seconds": "0", **named}, MAX_EMPTY_BYTES)
            after_s = time.perf_counter()
            trace = await _get(session, url, {"seconds": str(seconds), **named}, MAX_BYTES) if empty else None
    except TimeoutError:
        raise TargetError(f"{url}{PATH} cannot be read: it was not whole after {patience_s:g} s") from None
    if empty is None or trace is None:
        return None
    return Fetched(trace, clock_offset_s(before_s, empty["otherData"]["now_s"], after_s))


async def _get(session: aiohttp.ClientSession, url: str, query: dict[str, str], most_bytes: int) -> Trace | None:
    """Nobody but the named server is asked, or gets its key."""
    try:
        async with session.get(f"{url}{PATH}", params=query, allow_redirects=False) as response:
            body = await _whole(response, most_bytes)
            if response.status == 404:
                return None
            if response.status != 200:
                raise TargetError(f"{url}{PATH} answers HTTP {response.status}: {quoted(body) or response.reason}")
            return _checked(url, json.loads(body))
    except TimeoutError:
        raise
    except (aiohttp.ClientError, OSError, ValueError, RecursionError) as error:
        raise TargetError(f"{url}{PATH} cannot be read: {error}") from None


async def _whole(response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """Raises ValueError when it is too long."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > most_bytes:
            raise ValueError(f"more than {most_bytes} bytes")
    return bytes(body)


def _checked(url: str, trace: Any) -> Trace:
    """Raises TargetError when it lacks what is read of it later."""
    try:
        told = trace["otherData"]
        float(told["now_s"]), dict(told["missing"])
        for name in told["instances"]:
            units_of(trace, name), arrivals_of(trace, name), slices_of(trace, name)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TargetError(f"{url}{PATH} is no timeline of this version of pdmux-ray: {error!r}") from None
    found: Trace = trace
    return found


def run_samples(fetched: Fetched, begin_s: float, end_s: float, run: int) -> list[UnitsSample]:
    """The units of all instances together over a run, whose clock begins at `begin_s` of `time.perf_counter`."""
    changes = together([units_of(fetched.trace, name) for name in fetched.instances])
    moved = [change._replace(at_s=change.at_s + fetched.offset_s - begin_s) for change in changes]
    return samples_of(moved, Window(0.0, end_s - begin_s), run)


def timeline(args: argparse.Namespace) -> int:
    """`pdmux timeline`. Returns the exit code."""
    if args.out is None and args.picture is None:
        raise ConfigError("`pdmux timeline` needs --out FILE, --picture FILE, or both.")
    url = base_url(args.url)
    fetched = fetch(url, args.seconds, args.api_key, args.instance)
    if fetched is None:
        raise TargetError(f"{url} has no {PATH}: it is no server of pdmux-ray, or an older one.")
    if args.out is not None:
        _write(args.out, json.dumps(fetched.trace, separators=(",", ":")))
        print(f"{args.out}: open it at https://ui.perfetto.dev")
    if args.picture is not None:
        _write(args.picture, build(f"Timeline of {url}", fetched.trace, _footer(fetched.instances)))
        print(args.picture)
    for name in fetched.instances:
        print(f"instance {name}: {len(slices_of(fetched.trace, name))} steps and blocks")
    return 0


def _footer(instances: Sequence[str]) -> str:
    count = "1 instance" if len(instances) == 1 else f"{len(instances)} instances"
    return f"{count}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC. This file needs no network and sends nothing."


def _write(path: Path, text: str) -> None:
    """Raises ConfigError."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from None
