"""PD multiplexing against chunked prefill and 1:1 disaggregation: Llama-3.1-70B on eight A100, CodeLlama-34B on one H200.

With PD multiplexing this project prefills first what is due first. Its rivals and the publication's system go in order of
arrival, so it is run in that order, too: what is left then of a factor is not the order's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pdmux_ray.bench.literature.fleets import (
    CONTEXT,
    SEED,
    TOKEN_IDS,
    Fleet,
    Load,
    StepTimes,
    Tell,
    config,
    limit,
    offered,
    words,
)
from pdmux_ray.bench.literature.rows import Comparison, Row
from pdmux_ray.costs.gpu import A100, CODE_LLAMA_34B, H200, LLAMA_70B, Gpu, GpuModel
from pdmux_ray.metrics.goodput import Bound, Goodput, Slo
from pdmux_ray.metrics.summary import summarize_run
from pdmux_ray.report import figures
from pdmux_ray.workload.scaling import Scaling
from pdmux_ray.workload.source import load_workload

PAGE_SIZE = 64  # tokens; the shapes share blocks of 512, so any divisor reuses as much
MAX_BATCH = 256
TTFT_S, TTFT_S_PER_TOKEN = 1.0, 1e-3  # MuxWise's public code takes the greater of both; ours adds them
BY_ARRIVAL = ", in order of arrival"
NO_HURRY_S = 1e6  # an objective that everybody keeps: who came first is due first, and nobody has a reason to overtake


@dataclass(frozen=True, slots=True)
class Work:
    """A shape, how much of it a run has, and between which rates of a server limits are looked for."""

    shape: str
    requests: int
    rates: tuple[float, float]

    def load(self) -> Load:
        workload = load_workload(self.shape, scaling=Scaling(max_context=CONTEXT), token_ids=TOKEN_IDS)
        return Load(workload.asks(self.requests, SEED), self.rates)


WORKS_70B = (
    Work("tool-agent", 400, (0.2, 3.2)),
    Work("sharegpt", 1_000, (8.0, 64.0)),
    Work("loogle", 300, (0.2, 6.4)),
    Work("openthoughts", 200, (0.2, 3.2)),
)
WORKS_34B = (Work("sharegpt", 1_000, (8.0, 64.0)), Work("loogle", 400, (0.4, 3.2)))
CHUNKS_34B = (256, 512, 1024, 2048, 4096)
LOADED = (0.5, 0.8)  # of what PD multiplexing carries: rates at which chunk sizes are compared

PUBLISHED_70B: Mapping[str, tuple[float, float]] = {"tool-agent": (3.06, 1.62)}  # over chunks of 512, over 1:1
TTFT_H200 = "2.28 (mean of H100 and H200, other work)"  # chunked prefill's P99 TTFT over PD multiplexing's


def slo(itl_s: float) -> Slo:
    return Slo(ttft_s=TTFT_S, ttft_s_per_token=TTFT_S_PER_TOKEN, itl_s=itl_s)


@dataclass(frozen=True, slots=True)
class Server:
    """All GPUs of a comparison, and the ITL objective of its systems."""

    gpu: Gpu
    model: GpuModel
    gpus: int
    itl_s: float
    steps: StepTimes

    def multiplexed(self) -> Fleet:
        """What is due first goes first."""
        objectives = {"itl_s": self.itl_s, "ttft_s": TTFT_S, "ttft_s_per_token": TTFT_S_PER_TOKEN}
        return self._whole("PD multiplexing", {"mode": "split", "multiplex": objectives})

    def multiplexed_by_arrival(self) -> Fleet:
        objectives = {"itl_s": self.itl_s, "ttft_s": NO_HURRY_S}
        return self._whole(f"PD multiplexing{BY_ARRIVAL}", {"mode": "split", "multiplex": objectives})

    def chunked(self, tokens: int) -> Fleet:
        return self._whole(f"chunks of {tokens}", {"mode": "chunked", "chunk_tokens": tokens})

    def halves(self) -> Fleet:
        """One instance of half of the GPUs prefills, another one decodes."""
        half = self.steps.device(self.gpu, self.model, PAGE_SIZE, tp=self.gpus // 2)
        device = replace(half, link_bytes_per_s=self.gpu.peer_bytes_per_s * self.gpus / 2)
        engine = {"mode": "prefill_first", "max_batch": MAX_BATCH, "page_size": PAGE_SIZE}
        routing = {"routing": {"policy": "remote"}}
        return Fleet("1:1", config(engine, topology={"prefill": 1, "decode": 1}, gateway=routing), device, self.gpus)

    def _whole(self, name: str, engine: Mapping[str, Any]) -> Fleet:
        device = self.steps.device(self.gpu, self.model, PAGE_SIZE, tp=self.gpus)
        return Fleet(name, config({"max_batch": MAX_BATCH, "page_size": PAGE_SIZE, **engine}), device, self.gpus)


def server_70b(steps: StepTimes) -> Server:
    return Server(A100, LLAMA_70B, 8, 0.1, steps)


def server_34b(steps: StepTimes) -> Server:
    return Server(H200, CODE_LLAMA_34B, 1, 0.06, steps)


def compare_70b(steps: StepTimes, tell: Tell) -> Comparison:
    server = server_70b(steps)
    rows = [row for work in WORKS_70B for row in _rows_70b(server, work, tell)]
    return Comparison(
        "PD multiplexing on 8 × A100: Llama-3.1-70B",
        "Cui et al., “PD-Multiplexing” (LMSYS, 2025) and MuxWise (arXiv:2504.14489): one server of eight A100-80G, P99 TBT "
        "100 ms. Goodput over chunked prefill and over SGLang's disaggregation 1:1; of the other workloads only curves.",
        rows,
        [
            f"Goodput of the whole server: 90 % of requests with {figures.slo(slo(server.itl_s))}. One instance of TP 8, "
            f"or two of TP 4. At most {MAX_BATCH} requests at once, prefix caches on, KV between the halves over NVLink. "
            f"The shapes are this project's: {_requests(WORKS_70B)}, Poisson.",
            str(steps),
        ],
        "the source does not say which TTFT its goodput asks for. PD multiplexing here prefills first what is due first; the "
        "source goes in order of arrival, as chunks and 1:1 do here, so that only the rows in order of arrival compare ways to "
        "share GPUs.",
    )


def _rows_70b(server: Server, work: Work, tell: Tell) -> list[Row]:
    load, objective = work.load(), [slo(server.itl_s)]
    fleets = (server.multiplexed(), server.multiplexed_by_arrival(), server.chunked(512), server.halves())
    found = [limit(fleet, load, objective, lambda text: tell(f"{work.shape}: {text}")) for fleet in fleets]
    rows = [
        Row(f"{work.shape}: {fleet.name}", None, most.rps, "requests/s", ours_as=words(most))
        for fleet, most in zip(fleets, found, strict=True)
    ]
    by_due, by_arrival, *others = found
    for rival, other, ratio in zip(fleets[2:], others, PUBLISHED_70B.get(work.shape, (None, None)), strict=True):
        for order, muxed in (("", by_due), (BY_ARRIVAL, by_arrival)):
            rows.append(Row(f"{work.shape}: multiplexed over {rival.name}{order}", ratio, over(muxed, other), "×"))
    return rows


def _requests(works: Sequence[Work]) -> str:
    return ", ".join(f"{work.requests:,} of {work.shape}" for work in works)


def over(one: Goodput, other: Goodput) -> float | None:
    """None when a limit lies outside of its search."""
    measured = one.bound is other.bound is Bound.MEASURED
    return one.rps / other.rps if measured else None


def compare_34b(steps: StepTimes, tell: Tell) -> Comparison:
    server = server_34b(steps)
    rows = [row for work in WORKS_34B for row in _rows_34b(server, work, tell)]
    return Comparison(
        "PD multiplexing on one H200: CodeLlama-34B at 60 ms",
        "Cui et al., “PD-Multiplexing” (LMSYS, 2025): chunked prefill keeps 60 ms only with chunks of less than 1,024 tokens, "
        "PD multiplexing always, with the fastest P99 TTFT; MuxWise has 2.28 × (mean of H100 and H200).",
        rows,
        [
            f"All systems get the same requests at {' and '.join(f'{share:.0%}' for share in LOADED)} of what PD multiplexing "
            f"carries (90 % of requests with {figures.slo(slo(server.itl_s))}): the source does not say its rates. P99 of all "
            f"gaps of all requests, and P99 TTFT. LooGLE has longer prompts than the model was made for, in the source, too. "
            f"The shapes are this project's: {_requests(WORKS_34B)}, Poisson.",
            str(steps),
        ],
        "a chunk runs on all SMs, a prefill beside decodes on a part of them; and a chunk of a long prompt reads the KV of all "
        "that was before it, up to 80,000 tokens of LooGLE's. Requests that are late already let others pass with PD "
        "multiplexing, which is this engine's rule and not the source's: not so in order of arrival.",
    )


def _rows_34b(server: Server, work: Work, tell: Tell) -> list[Row]:
    def told(text: str) -> None:
        tell(f"{work.shape}: {text}")

    load, fleets = work.load(), (server.multiplexed(), server.multiplexed_by_arrival())
    found = [limit(fleet, load, [slo(server.itl_s)], told) for fleet in fleets]
    rows = [
        Row(f"{work.shape}: {fleet.name}", None, most.rps, "requests/s", ours_as=words(most))
        for fleet, most in zip(fleets, found, strict=True)
    ]
    for share in LOADED if found[0].rps else ():
        rows += _chunk_sizes(server, work.shape, load, float(f"{share * found[0].rps:.3g}"), told)
    return rows


def _chunk_sizes(server: Server, shape: str, load: Load, rate: float, tell: Tell) -> list[Row]:
    """At one rate: PD multiplexing in both orders and each size of chunks; the largest that keeps the objective."""
    name = f"{shape} at {rate:g} requests/s"
    rows, muxed = [], {"": server.multiplexed(), BY_ARRIVAL: server.multiplexed_by_arrival()}
    tails = {order: _p99(fleet, load, rate) for order, fleet in muxed.items()}
    for order, fleet in muxed.items():
        rows.append(Row(f"{name}, {fleet.name}: P99 ITL, TTFT", None, None, "ms", "≤ 60, the quickest", _both_ms(tails[order])))
    chunked = [_p99(server.chunked(chunk), load, rate) for chunk in CHUNKS_34B]
    for chunk, both in zip(CHUNKS_34B, chunked, strict=True):
        rows.append(Row(f"{name}, chunks of {chunk}: P99 ITL, TTFT", None, None, "ms", ours_as=_both_ms(both)))
    tell(f"{rate:g} requests/s")
    holding = [(chunk, late_s) for chunk, (itl_s, late_s) in zip(CHUNKS_34B, chunked, strict=True) if itl_s <= server.itl_s]
    return [*rows, *best_chunk(name, holding, {order: late_s for order, (_, late_s) in tails.items()})]


def best_chunk(name: str, holding: Sequence[tuple[int, float]], ttft_s: Mapping[str, float]) -> list[Row]:
    """Of chunk sizes that keep the objective, with their P99 TTFT: the largest, and what the quickest has over PD multiplexing
    in each order (`ttft_s`)."""
    largest = max((chunk for chunk, _ in holding), default=None)
    quickest = min((late_s for _, late_s in holding), default=None)
    what, best = f"{name}: largest chunk that keeps 60 ms", f"{name}: P99 TTFT of the best such chunk over PD multiplexing"
    return [
        Row(what, None, largest, "tokens", published_as="under 1,024", ours_as=None if largest else "none"),
        *(Row(f"{best}{order}", None, quickest and quickest / late_s, "×", TTFT_H200) for order, late_s in ttft_s.items()),
    ]


def _p99(fleet: Fleet, load: Load, rate: float) -> tuple[float, float]:
    """Of all gaps of all requests, and of TTFTs; seconds."""
    found = summarize_run(fleet.name, rate, offered(fleet, load, rate), Slo())
    return found.itl_s.p99 or math.inf, found.ttft_s.p99 or math.inf


def _both_ms(tails: tuple[float, float]) -> str:
    return " and ".join(map(figures.ms, tails))
