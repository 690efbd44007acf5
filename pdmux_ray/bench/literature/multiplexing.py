"""PD multiplexing against chunked prefill and 1:1 disaggregation: Llama-3.1-70B on eight A100, CodeLlama-34B on one H200."""

from __future__ import annotations

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
from pdmux_ray.metrics.goodput import Goodput, Slo
from pdmux_ray.metrics.summary import RunSummary, summarize_run
from pdmux_ray.report import figures
from pdmux_ray.sim.gpu import A100, CODE_LLAMA_34B, H200, LLAMA_70B, Gpu, GpuModel
from pdmux_ray.workload.scaling import Scaling
from pdmux_ray.workload.source import load_workload

PAGE_SIZE = 64  # tokens; the shapes share blocks of 512, so any divisor reuses as much
MAX_BATCH = 256
TTFT_S, TTFT_S_PER_TOKEN = 1.0, 1e-3  # MuxWise's public code takes the greater of both; ours adds them


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
    Work("tool-agent", 600, (0.25, 8.0)),
    Work("sharegpt", 2_000, (2.0, 64.0)),
    Work("loogle", 400, (0.25, 8.0)),
    Work("openthoughts", 400, (0.1, 3.2)),
)
WORKS_34B = (Work("sharegpt", 1_500, (1.0, 32.0)), Work("loogle", 300, (0.1, 3.2)))
CHUNKS_34B = (256, 512, 1024, 2048, 4096)
LOADED = 0.8  # of what PD multiplexing carries: the rate at which chunk sizes are compared

PUBLISHED_70B: Mapping[str, tuple[float, float]] = {"tool-agent": (3.06, 1.62)}  # over chunks of 512, over 1:1
TTFT_H200 = 2.28  # chunked prefill's P99 TTFT over PD multiplexing's, mean of H100 and H200


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
        objectives = {"itl_s": self.itl_s, "ttft_s": TTFT_S, "ttft_s_per_token": TTFT_S_PER_TOKEN}
        return self._whole("PD multiplexing", {"mode": "split", "multiplex": objectives})

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
        "",
    )


def _rows_70b(server: Server, work: Work, tell: Tell) -> list[Row]:
    load, objective = work.load(), [slo(server.itl_s)]
    fleets = (server.multiplexed(), server.chunked(512), server.halves())
    muxed, *others = [limit(fleet, load, objective, lambda text: tell(f"{work.shape}: {text}")) for fleet in fleets]
    rows = [Row(f"{work.shape}: {fleets[0].name}", None, muxed.rps, "requests/s", ours_as=words(muxed))]
    published = PUBLISHED_70B.get(work.shape, (None, None))
    for fleet, other, ratio in zip(fleets[1:], others, published, strict=True):
        rows.append(Row(f"{work.shape}: {fleet.name}", None, other.rps, "requests/s", ours_as=words(other)))
        rows.append(Row(f"{work.shape}: multiplexed over {fleet.name}", ratio, over(muxed, other), "×"))
    return rows


def _requests(works: Sequence[Work]) -> str:
    return ", ".join(f"{work.requests:,} of {work.shape}" for work in works)


def over(one: Goodput, other: Goodput) -> float | None:
    return one.rps / other.rps if other.rps else None


def compare_34b(steps: StepTimes, tell: Tell) -> Comparison:
    server = server_34b(steps)
    rows = [row for work in WORKS_34B for row in _rows_34b(server, work, tell)]
    return Comparison(
        "PD multiplexing on one H200: CodeLlama-34B at 60 ms",
        "Cui et al., “PD-Multiplexing” (LMSYS, 2025): chunked prefill keeps 60 ms only with chunks of less than 1,024 tokens, "
        "PD multiplexing always, with the fastest P99 TTFT; MuxWise has 2.28 × (mean of H100 and H200).",
        rows,
        [
            f"All systems get the same requests at {LOADED:.0%} of what PD multiplexing carries (90 % of requests with "
            f"{figures.slo(slo(server.itl_s))}): the source does not say its rates. P99 of all gaps of all requests, and P99 "
            f"TTFT. Prompts of LooGLE are longer than the model was made for, in the source, too. The shapes are this "
            f"project's: {_requests(WORKS_34B)}, Poisson.",
            str(steps),
        ],
        "",
    )


def _rows_34b(server: Server, work: Work, tell: Tell) -> list[Row]:
    load, muxed, name = work.load(), server.multiplexed(), work.shape

    def told(text: str) -> None:
        tell(f"{name}: {text}")

    most = limit(muxed, load, [slo(server.itl_s)], told)
    rate = float(f"{LOADED * most.rps:.3g}")
    if not rate:
        return [Row(f"{name}: {muxed.name}", None, 0.0, "requests/s", ours_as=words(most))]
    base = _at(rate, muxed, load, told)
    rows = [
        Row(f"{name}: {muxed.name}", None, most.rps, "requests/s", ours_as=words(most)),
        Row(f"{name} at {rate:g} requests/s: {muxed.name}: P99 ITL", 60.0, _ms(base.itl_s.p99), "ms", published_as="≤ 60"),
        Row(f"{name} at {rate:g} requests/s: {muxed.name}: P99 TTFT", None, _ms(base.ttft_s.p99), "ms"),
    ]
    holding: list[tuple[int, float]] = []
    for chunk in CHUNKS_34B:
        run = _at(rate, server.chunked(chunk), load, told)
        itl_s, ttft_s = run.itl_s.p99, run.ttft_s.p99
        said = f"{figures.ms(itl_s)} / {figures.ms(ttft_s)}"
        rows.append(Row(f"{name}: chunks of {chunk}: P99 ITL / TTFT", None, None, "ms", ours_as=said))
        if itl_s is not None and ttft_s is not None and itl_s <= server.itl_s:
            holding.append((chunk, ttft_s))
    return [*rows, *_best(name, holding, base.ttft_s.p99)]


def _best(name: str, holding: Sequence[tuple[int, float]], ttft_s: float | None) -> list[Row]:
    """Of chunk sizes that keep the objective, with their P99 TTFT: the largest, and what the quickest has over `ttft_s`."""
    largest = max((chunk for chunk, _ in holding), default=None)
    quickest = min((late_s for _, late_s in holding), default=None)
    what = f"{name}: largest chunk that keeps 60 ms"
    ratio = quickest / ttft_s if quickest and ttft_s else None
    return [
        Row(what, 512.0, largest, "tokens", published_as="under 1,024", ours_as=None if largest else "none"),
        Row(f"{name}: P99 TTFT of the best such chunk over multiplexed", TTFT_H200, ratio, "×"),
    ]


def _at(rate: float, fleet: Fleet, load: Load, tell: Tell) -> RunSummary:
    found = summarize_run(fleet.name, rate, offered(fleet, load, rate), Slo())
    tell(f"{fleet.name} at {rate:g} requests/s: P99 ITL {figures.ms(found.itl_s.p99)} ms")
    return found


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
