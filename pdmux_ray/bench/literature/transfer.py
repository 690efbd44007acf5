"""How long the KV of one prompt takes from one instance to another: DistServe's estimate, in closed form."""

from __future__ import annotations

from pdmux_ray.bench.literature.fleets import StepTimes
from pdmux_ray.bench.literature.rows import Comparison, Row
from pdmux_ray.costs.gpu import A100, OPT_175B
from pdmux_ray.sim.transfers import LATENCY_S

TOKENS = 2048
GPUS = 8
LINK = 64e9  # bytes a second of each GPU: PCIe 5 x16, one direction


def compare(steps: StepTimes) -> Comparison:
    device = steps.device(A100, OPT_175B, tp=GPUS)
    whole_s = LATENCY_S + TOKENS * device.kv_bytes_per_token / (GPUS * LINK)
    step_s = device.costs.decode(1, TOKENS, device.units, 0).predicted_s
    rows = [
        Row("KV of a token", 4.5, device.kv_bytes_per_token / 1e6, "MB"),
        Row(f"KV of {TOKENS:,} tokens over {GPUS} × PCIe 5 x16", 17.6, whole_s * 1e3, "ms"),
        Row("of it after the prefill, pushed layer by layer", None, whole_s / device.layout.layers * 1e3, "ms"),
        Row(f"a decode step on {GPUS} × A100", 40.0, step_s * 1e3, "ms", published_as="30 to 50"),
    ]
    return Comparison(
        "KV transfer of OPT-175B",
        "the authors of DistServe, “Throughput is Not All You Need” (2024): 2048 tokens × 4.5 MB / (64 GB/s × 8).",
        rows,
        [
            "The link carries what its name says; a message takes 10 µs more; each GPU sends its own heads' KV over a link of "
            "its own. The decode step is of one request with the whole prompt as context.",
            str(steps),
        ],
        "4.5 MB are MiB (96 layers × 2 × 12,288 × 2 bytes), and the published quotient counts 1,024 MB as a GB of the link's: "
        "that alone is the 7 %.",
    )
