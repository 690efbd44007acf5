"""Instances' timelines as one trace, for `GET /debug/timeline`. Knows nothing of ray or HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence

from pdmux_ray.engine.timeline import Record, unpack
from pdmux_ray.errors import InstanceUnavailableError, RequestError
from pdmux_ray.metrics.trace import Source, chrome_trace, clock_offset_s
from pdmux_ray.serve.links import Link

ANSWER_S = 5.0  # an instance that has not answered by then is left out


async def trace_json(links: Mapping[str, Link], instance: str | None, seconds: float) -> bytes:
    """The last `seconds` of one instance, or of all (None), on this machine's monotonic clock. Costs each instance a few
    milliseconds a page; an engine keeps so many records and no more, which bounds the answer.

    Raises RequestError for an instance that is not linked, InstanceUnavailableError when the only one does not answer.
    """
    if instance is not None and instance not in links:
        there = ", ".join(links) or "none"
        raise RequestError(f"There is no instance {instance!r}; there are: {there}.", param="instance")
    chosen = [links[instance]] if instance is not None else list(links.values())
    answers = await asyncio.gather(*(_source(link, seconds) for link in chosen), return_exceptions=True)
    sources = [answer for answer in answers if isinstance(answer, Source)]
    missing = {link.instance_id: str(a) for link, a in zip(chosen, answers, strict=True) if isinstance(a, BaseException)}
    if instance is not None and missing:
        raise InstanceUnavailableError(f"Instance {instance} did not tell its timeline: {missing[instance]}")
    return await asyncio.to_thread(_encoded, sources, missing)


async def _source(link: Link, seconds: float) -> Source:
    """Page by page: between two of them the instance goes on with its work."""
    records: list[Record] = []
    before_s, offset_s = time.monotonic(), None
    try:
        async with asyncio.timeout(ANSWER_S):
            while True:
                page = await link.line.timeline(records[-1].number + 1 if records else 0, seconds)
                if offset_s is None:
                    offset_s = clock_offset_s(before_s, page["now_s"], time.monotonic())
                records += map(unpack, page["records"])
                if not page["more"]:
                    return Source(link.instance_id, page["units"], records, offset_s, page["lessons"])
    except TimeoutError:
        raise InstanceUnavailableError(f"it did not answer within {ANSWER_S:g} s") from None


def _encoded(sources: Sequence[Source], missing: Mapping[str, str]) -> bytes:
    return json.dumps(chrome_trace(sources, time.monotonic(), missing), separators=(",", ":")).encode()
