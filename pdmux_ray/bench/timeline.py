"""`pdmux timeline URL`: what a server's step loops did lately, as a file for https://ui.perfetto.dev and as a picture. And what
`pdmux bench` takes of it for its reports."""

from __future__ import annotations

import argparse
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from pdmux_ray.bench.load.answer import quoted
from pdmux_ray.bench.load.targets import TargetError, base_url
from pdmux_ray.errors import ConfigError
from pdmux_ray.metrics.trace import Trace, arrivals_of, clock_offset_s, events_of, together, units_of
from pdmux_ray.report.series import UnitsSample, Window
from pdmux_ray.report.timeline import build, samples_of

PATH = "/debug/timeline"
TIMEOUT_S = 30.0  # of a silence
MAX_S = 60.0  # of an answer
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


def fetch(url: str, seconds: float, api_key: str | None = None, instance: str | None = None) -> Fetched | None:
    """The last `seconds`; None when the server has no timeline to tell. Raises TargetError.

    A first, empty trace tells how the clocks differ: its answer takes so little time that little can be wrong.
    """
    named = {"instance": instance} if instance else {}
    before_s = time.perf_counter()
    empty = _get(url, {"seconds": 0, **named}, api_key, MAX_EMPTY_BYTES)
    after_s = time.perf_counter()
    trace = _get(url, {"seconds": seconds, **named}, api_key, MAX_BYTES) if empty else None
    if empty is None or trace is None:
        return None
    return Fetched(trace, clock_offset_s(before_s, empty["otherData"]["now_s"], after_s))


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Nobody but the named server is asked, or gets its key."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _get(url: str, query: dict[str, Any], api_key: str | None, most_bytes: int) -> Trace | None:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(f"{url}{PATH}?{urlencode(query)}", headers=headers)
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=TIMEOUT_S) as response:
            return _checked(url, json.loads(_whole(response, most_bytes)))
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 404:
                return None
            raise TargetError(f"{url}{PATH} answers HTTP {error.code}: {quoted(error.read(2000)) or error.reason}") from None
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        raise TargetError(f"{url}{PATH} cannot be read: {error}") from None


def _whole(response: http.client.HTTPResponse, most_bytes: int) -> bytes:
    """Raises ValueError when it is too long, or takes too long."""
    body, end_s = bytearray(), time.monotonic() + MAX_S
    while piece := response.read1(1 << 16):
        body += piece
        if len(body) > most_bytes:
            raise ValueError(f"more than {most_bytes} bytes")
        if time.monotonic() > end_s:
            raise ValueError(f"not whole after {MAX_S:.0f} s")
    return bytes(body)


def _checked(url: str, trace: Any) -> Trace:
    """Raises TargetError when it lacks what is read of it later."""
    try:
        told = trace["otherData"]
        float(told["now_s"]), dict(told["missing"])
        for name in told["instances"]:
            units_of(trace, name), arrivals_of(trace, name)
            [(event["tid"], event["cat"], event["dur"] + 0, event["args"]) for event in events_of(trace, name, "X")]
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
        print(f"instance {name}: {len(events_of(fetched.trace, name, 'X'))} steps and blocks")
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
