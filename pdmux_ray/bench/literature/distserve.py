"""DistServe's example: what one A100 carries of a 13B model when it does both phases, when it does one, and what three carry.

Simulated twice: with our step times, and with those that DistServe's authors measured of two engines on that GPU and
published with their simulator. What is left between the two is the device; between the second and the publication, the rest.
What is said of their measured runs is from `simdistserve/benchmarks/alignment/data-ground-truth` there (vllm-100-1.exp,
distserve-100-1.exp: a request a second).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pdmux_ray.bench.literature.fleets import SEED, TOKEN_IDS, Fleet, Load, StepTimes, Tell, config, limit, words
from pdmux_ray.bench.literature.rows import Comparison, Row
from pdmux_ray.costs.device import DeviceModel
from pdmux_ray.costs.gpu import A100, OPT_13B, device_with
from pdmux_ray.costs.sm_share import Assumptions, Ramp, WholeTimes, parameters_of
from pdmux_ray.latency.features import BATCH_KNOTS, TOKEN_KNOTS
from pdmux_ray.latency.model import FittedCosts
from pdmux_ray.metrics.goodput import Goodput, Slo
from pdmux_ray.workload.source import load_workload

PROMPT, OUTPUT = 512, 64
TTFT, TPOT = Slo(ttft_s=0.4), Slo(itl_s=0.04, itl_statistic="mean")
REQUESTS = 600
DRAIN_S = 20.0  # a request within the objectives takes 3 s
FEEDERS = 8  # prefill instances that keep one decode instance busy, when that one alone is looked at
RATES = (0.5, 32.0)
NO_HOST = Assumptions(host_s=0.0)  # steps were measured in servers, with it


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """Step times of OPT-13B on one A100-80G, in ms: `simdistserve/estimators/profile_data` of DistServe's repository."""

    prefill: tuple[float, float, float]  # of a step, of each token, of the sum of the prompts' squares
    decode: tuple[float, float, float]  # of a step, of each token of context, of each request (of fewer than 95)

    def device(self) -> DeviceModel:
        """An A100 that takes these."""
        step, token, square = (each / 1e3 for each in self.prefill)
        weights, context, row = (each / 1e3 for each in self.decode)
        times = WholeTimes(
            step_s=0.0,
            block_s=0.0,
            rows=Ramp.line(BATCH_KNOTS, weights, row),
            context_s=context,
            pass_row_s=0.0,
            tokens=Ramp.line(TOKEN_KNOTS, step, token),
            own_s=2 * square,  # of n (n + 1) / 2 pairs
            reused_s=square,
            exchange_rows=Ramp.line(BATCH_KNOTS, 0.0, 0.0),
            exchange_tokens=Ramp.line(TOKEN_KNOTS, 0.0, 0.0),
        )
        parameters = parameters_of(times, OPT_13B.layers, A100.units, A100.decode_slower, A100.bytes_per_s, NO_HOST)
        return device_with(FittedCosts(parameters), A100, OPT_13B, 16, tp=1)


VLLM = MeasuredTimes((23.627, 0.150546, 8.653e-6), (19.563, 0.00049411, 0.050606))
DISTSERVE = MeasuredTimes((16.457, 0.0926475, 6.4748e-6), (19.935, 0.00062694, 0.038507))


@dataclass(frozen=True, slots=True)
class Devices:
    """Of the colocated fleet, and of those that are not."""

    colocated: DeviceModel
    apart: DeviceModel

    def fleet(self, prefill: int, decode: int) -> Fleet:
        """(0, 0): one instance that does both, prompts first, as engines did then."""
        engine = {"mode": "prefill_first", "max_batch": 256}
        if not prefill:
            return Fleet("colocated", config(engine), self.colocated, 1)
        topology = {"prefill": prefill, "decode": decode}
        device = replace(self.apart, link_bytes_per_s=A100.peer_bytes_per_s)
        always = config(engine, topology=topology, gateway={"routing": {"policy": "remote"}})
        return Fleet(f"{prefill}P{decode}D", always, device, prefill + decode)


def compare(steps: StepTimes, tell: Tell) -> Comparison:
    device = steps.device(A100, OPT_13B)
    ours = Devices(device, device)
    measured = Devices(VLLM.device(), DISTSERVE.device())
    return Comparison(
        "DistServe's 13B model on A100s",
        "the authors of DistServe, “Throughput is Not All You Need” (2024), and OSDI '24: one A100-80G, 512 tokens in, 64 out, "
        "Poisson, P90 TTFT 0.4 s and P90 TPOT 0.04 s, tested apart.",
        [*rows("", ours, tell), *rows(", their step times", measured, tell)],
        [
            f"OPT-13B, 16 bits; {REQUESTS} requests, all of which count; a rate holds when 90 % keep each objective. Both "
            f"phases: prompts first, up to 2,048 tokens of them in a step. Prefill alone: answers of one token. Decode alone: "
            f"{FEEDERS} prefill instances before it, and only TPOT counts. KV goes over NVLink, 300 GB/s. Their step times: of "
            f"vLLM where one GPU does both, of DistServe's engine elsewhere, as its authors fitted them to steps.",
            f"Ours: {steps}",
        ],
        "the published curves lie below their authors' own step times. 10 requests/s are 25 decodes at once, for which their "
        "fit has a step of 29 ms, not 40; and 5.6 prompts a second of 66 ms each keep a GPU busy for 37 % of the time, too "
        "little for queues of 0.4 s. What an engine takes besides its steps explains little: in the runs of ShareGPT that the "
        "authors published beside the fits, a nearly idle vLLM takes 25 ms a decode step and DistServe's engine 22, both 20 by "
        "the fits, and neither takes longer for a prompt of 511 tokens than by the fits. What the rest is, a busy host or an "
        "engine's rules, the sources do not say.",
    )


def rows(how: str, devices: Devices, tell: Tell) -> list[Row]:
    found = limits(devices, lambda text: tell(f"distserve{how}: {text}"))
    one_gpu = min(found["ttft"], found["tpot"], key=lambda each: each.rps)
    apart = found["2P1D"].rps / 3
    published = {"ttft": 3.0, "tpot": 1.6, "prefill": 5.6, "decode": 10.0}
    names = {
        "ttft": f"one GPU, both phases{how}: TTFT holds",
        "tpot": f"one GPU, both phases{how}: TPOT holds",
        "prefill": f"one GPU, prefill alone{how}",
        "decode": f"one GPU, decode alone{how}",
    }
    unit = "requests/s"
    each = [Row(names[key], published[key], found[key].rps, unit, ours_as=words(found[key])) for key in published]
    return [
        *each,
        Row(f"2P1D, of each GPU{how}", 3.3, apart, unit, ours_as=words(found["2P1D"], 3)),
        Row(f"2P1D over both phases{how}", 3.3 / 1.6, apart / one_gpu.rps if one_gpu.rps else None, "×"),
    ]


def limits(devices: Devices, tell: Tell) -> Mapping[str, Goodput]:
    """By what is looked at, of the whole fleet."""
    both, first = loads()
    colocated = devices.fleet(0, 0)
    prefill = replace(colocated, name="prefill alone", device=devices.apart)
    asked: Mapping[str, tuple[Fleet, Load, Sequence[Slo]]] = {
        "ttft": (colocated, both, [TTFT]),
        "tpot": (colocated, both, [TPOT]),
        "prefill": (prefill, first, [TTFT]),
        "decode": (devices.fleet(FEEDERS, 1), both, [TPOT]),
        "2P1D": (devices.fleet(2, 1), both, [TTFT, TPOT]),
    }
    return {key: limit(fleet, load, slos, tell) for key, (fleet, load, slos) in asked.items()}


def loads() -> tuple[Load, Load]:
    """Requests, and the same ones with answers of one token."""
    asks = load_workload(f"fixed:{PROMPT},{OUTPUT}", token_ids=TOKEN_IDS).asks(REQUESTS, SEED)
    both = Load(asks, RATES, DRAIN_S, tolerance=0.06)
    return both, replace(both, asks=[replace(ask, output_tokens=1) for ask in asks])
