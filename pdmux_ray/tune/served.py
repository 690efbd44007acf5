"""What is left of a search for those who serve: a Serve config of one candidate, and what to expect of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from pdmux_ray.config import IMPORT_PATH
from pdmux_ray.costs.gpu import GpuModel
from pdmux_ray.metrics.dashboards.expected import Expected
from pdmux_ray.metrics.goodput import Slo
from pdmux_ray.tune.candidates import PREDICT, Candidate, Kind, merged
from pdmux_ray.tune.standing import Standing
from pdmux_ray.types import ONE_PASS_MODES

PROFILE = "serve.profile.json"  # beside the config
MAX_BATCH = 512


@dataclass(frozen=True, slots=True)
class Servers:
    """Of this release, for one model."""

    shape: GpuModel | None  # None: a checkpoint that was profiled, so servers have it
    on_gpu: bool

    def lack(self, candidate: Candidate) -> str | None:
        """What they lack to run it: a sentence. None: nothing."""
        if self.shape is not None and not self.shape.served:
            return f"servers do not know models such as {self.shape.name}."
        if candidate.topology.tp > 1:
            return f"servers have no tensor parallelism yet: nothing in a config says TP {candidate.topology.tp}."
        if self.on_gpu and candidate.topology.kind is not Kind.AGGREGATED:
            return "GPU instances cannot share their KV yet and refuse to start with a topology (docs/disaggregation.md)."
        return None

    def can_run(self, candidate: Candidate) -> bool:
        return self.lack(candidate) is None


def base_settings(model: str, slo: Slo) -> dict[str, Any]:
    """Settings of every candidate: objectives, and limits that leave the choice to the device."""
    objectives = {"ttft_s": slo.ttft_s, "ttft_s_per_token": slo.ttft_s_per_token, "itl_s": slo.itl_s}
    given = {key: value for key, value in objectives.items() if value}
    return {
        "model": model,
        "engine": {
            "device": "cuda",
            "max_batch": MAX_BATCH,
            "max_waiting": 4 * MAX_BATCH,
            "max_prefill_tokens": 8192,
            "multiplex": given,
        },
        "gateway": {"slo": {"default": {**given, "itl_statistic": slo.itl_statistic}}},
    }


def serve_config(candidate: Candidate, args: Mapping[str, Any], comments: Sequence[str], file: str = "serve.yaml") -> str:
    """A file for `scripts/serve`. `args`: all settings of the candidate; `comments`: lines of its head."""
    needs_profile = candidate.mode not in ONE_PASS_MODES or candidate.route == PREDICT
    if needs_profile and "profile" not in args["engine"]["multiplex"]:
        args = merged(args, {"engine": {"multiplex": {"profile": PROFILE}}})
        comments = [
            *comments,
            "It predicts, so it needs a profile of one of the GPUs, beside this file; that takes minutes:",
            f"  .venv/bin/pdmux profile {file} --out {PROFILE}",
        ]
    application = {"name": "pdmux", "route_prefix": "/", "import_path": IMPORT_PATH, "args": dict(args)}
    document = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": 8000},
        "applications": [application],
    }
    head = "".join(f"# {line}\n" for line in comments)
    return head + yaml.safe_dump(document, sort_keys=False, width=128)


def expected(standing: Standing, slo: Slo) -> Expected:
    """Of a candidate that holds some rate."""
    assert standing.held is not None
    at = standing.held.summary
    return Expected(
        str(standing.candidate),
        standing.goodput.rps * standing.gpus,
        standing.attainment,
        at.ttft_s.p99,
        at.itl_s.p99,
        slo.ttft_limit_s(0),
        slo.itl_s,
    )
