"""Small fleets on a made-up device, so that a run takes milliseconds."""

from __future__ import annotations

from collections.abc import Sequence

from kv_transfer.layout import KVLayout
from pdmux_ray.config import AppConfig, parse_app_config
from pdmux_ray.costs.device import DeviceModel
from pdmux_ray.engine.fake_runner import linear_costs
from pdmux_ray.policy.fake_costs import FakeCosts
from pdmux_ray.policy.views import CostModel
from pdmux_ray.types import Split
from pdmux_ray.workload.arrivals import plan
from pdmux_ray.workload.requests import Ask, PlannedRequest

LAYERS, UNITS, PAGE, PAGES = 4, 8, 4, 400
STEP_S, TOKEN_S = 0.01, 1e-4
LINK = 1e6  # bytes a second
COSTS = FakeCosts(UNITS, LAYERS, knee=4, fixed_s=0.0, weights_s=0.005, request_s=1e-4, context_s=1e-6, token_s=TOKEN_S)


def device(costs: CostModel = COSTS) -> DeviceModel:
    splits = tuple(Split(UNITS - units, units) for units in range(1, UNITS))
    return DeviceModel("small", costs, KVLayout(LAYERS, PAGES, 1, PAGE, 8, 2), UNITS, splits, LINK)


def linear() -> DeviceModel:
    """Takes what a FakeRunner of these two takes."""
    return device(linear_costs(STEP_S, TOKEN_S, LAYERS, UNITS))


def config(prefill: int = 1, mux: int = 1, decode: int = 0, policy: str = "predict", **engine: object) -> AppConfig:
    return parse_app_config(
        {
            "topology": {"prefill": prefill, "mux": mux, "decode": decode},
            "engine": {"device": "fake", "mode": "auto", "page_size": PAGE, "multiplex": {"itl_s": 0.05}, **engine},
            "gateway": {"routing": {"policy": policy, "threshold_tokens": 40, "bandwidth": LINK}},
        }
    )


def requests(*asked: tuple[float, int, int]) -> list[PlannedRequest]:
    """(when it comes, prompt tokens, output tokens). No two prompts begin alike."""
    asks = [Ask((index, *range(1000, 1000 + tokens - 1)), output) for index, (_, tokens, output) in enumerate(asked)]
    return plan(asks, [due_s for due_s, _, _ in asked])


def stream(lengths: Sequence[tuple[int, int]], gap_s: float) -> list[PlannedRequest]:
    return requests(*((index * gap_s, tokens, output) for index, (tokens, output) in enumerate(lengths)))
