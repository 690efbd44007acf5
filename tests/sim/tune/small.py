"""A small made-up device, and what candidates have in common on it."""

from __future__ import annotations

from dataclasses import replace

from pdmux_ray.costs.device import DeviceModel
from pdmux_ray.metrics.goodput import Slo
from pdmux_ray.tune.candidates import LOCAL, REMOTE, Candidate, Topology
from pdmux_ray.tune.served import base_settings
from pdmux_ray.tune.trial import Setting
from pdmux_ray.types import Mode
from pdmux_ray.workload.arrivals import POISSON
from pdmux_ray.workload.scaling import Scaling
from pdmux_ray.workload.source import load_workload
from tests.unit.sim.fleets import LINK, PAGE, device

SLO = Slo(ttft_s=0.2, itl_s=0.05)
MUX = Candidate(Topology(1, 0, 2, 0), Mode.AUTO, LOCAL)
SPLIT = Candidate(Topology(1, 1, 0, 1), Mode.AUTO, REMOTE)
LINK_10 = 10 * LINK


def small(tp: int, changes: tuple[tuple[str, float], ...]) -> DeviceModel:
    return replace(device(), link_bytes_per_s=LINK_10 * dict(changes).get("link", 1.0))


def setting(load: str = "fixed:100,5", requests: int = 40) -> Setting:
    base = base_settings("demo", SLO)
    base["engine"] |= {"page_size": PAGE, "device": "fake"}
    workload = load_workload(load, scaling=Scaling(max_context=200), token_ids=(1000, 40000))
    return Setting(workload, POISSON, requests, 0, SLO, 0.9, base, small, 256, 0.03, 0.0005, 5.0, seed=3)
