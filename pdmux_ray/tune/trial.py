"""One trial: a candidate, simulated at one rate, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pdmux_ray.config import parse_app_config
from pdmux_ray.costs.device import DeviceModel
from pdmux_ray.metrics.goodput import RatePoint, Slo
from pdmux_ray.metrics.summary import RunSummary, rate_point, summarize_run
from pdmux_ray.sim.backlog import falls_behind
from pdmux_ray.sim.fleet import Run, simulate
from pdmux_ray.tune.binding import Binds, Ran, Uses, causes, uses
from pdmux_ray.tune.candidates import Candidate, configured
from pdmux_ray.tune.grid import clearly
from pdmux_ray.types import Role
from pdmux_ray.workload.arrivals import Arrivals, plan
from pdmux_ray.workload.requests import Ask, PlannedRequest, Workload

SHORT = 4  # a run of one part in so many of the requests comes first
WARMUP = 10  # one request in so many comes before those that count
LEVEL = 0.01  # chance that a candidate is called clearly too slow at a rate that it just holds, were its misses independent


@dataclass(frozen=True, slots=True)
class Changes:
    """To what is assumed, for sensitivity."""

    assume: tuple[tuple[str, float], ...] = ()  # see `Setting.device`
    spread: float = 1.0  # times as much
    line: float = 1.0


NO_CHANGES = Changes()


@dataclass(frozen=True, slots=True)
class Setting:
    """What all candidates have in common. Two trials of the same candidate, rate and setting are equal."""

    workload: Workload
    arrivals: Arrivals
    requests: int  # of a whole run, warm-up included
    skip: int  # of the workload's, so many come before those
    slo: Slo
    attainment: float
    base: Mapping[str, Any]  # settings of all configurations
    device: Callable[[int, tuple[tuple[str, float], ...]], DeviceModel]  # of (TP, assumptions other than the usual ones)
    context_length: int
    spread: float  # see `sim.fleet.simulate`, as the next two
    line_s: float
    drain_s: float
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """What came of one trial."""

    point: RatePoint  # requests a second of the whole fleet
    summary: RunSummary
    causes: Mapping[Binds, int]  # of misses
    uses: Uses
    falls_behind: bool  # its queue grows: for longer it would be worse
    clear: bool  # its share of good requests is far from the attainment; False: near it

    def good_enough(self, attainment: float) -> bool:
        return self.point.good_fraction >= attainment

    def held(self, attainment: float) -> bool:
        """A queue that grows fills any time that is allowed, however many were good before."""
        return self.good_enough(attainment) and not self.falls_behind

    def clearly_failed(self, attainment: float) -> bool:
        """Beyond chance. A queue that grew is none: the run may have ended in a burst."""
        return self.clear and not self.good_enough(attainment)


@dataclass(slots=True)
class Trials:
    """Runs them, and keeps what they share. Owner: one process."""

    setting: Setting
    _asks: list[Ask] = field(default_factory=list)
    _devices: dict[tuple[int, Changes], DeviceModel] = field(default_factory=dict)

    def judge(self, candidate: Candidate, rate: float, changes: Changes = NO_CHANGES) -> Found:
        """Of a part of the requests, where so many of them missed that the whole run would not hold either."""
        short = self.run(candidate, rate, changes, part=SHORT)
        return short if self._is_hopeless(short) else self.run(candidate, rate, changes)

    def run(self, candidate: Candidate, rate: float, changes: Changes = NO_CHANGES, part: int = 1) -> Found:
        """Of the first one in `part` requests, when they would come in a whole run. Raises ConfigError for settings that no
        engine takes."""
        setting, device = self.setting, self._device(candidate.topology.tp, changes)
        run = simulate(
            parse_app_config(configured(setting.base, candidate, device.link_bytes_per_s)),
            device,
            self._planned(rate, part),
            seed=setting.seed,
            spread=setting.spread * changes.spread,
            line_s=setting.line_s * changes.line,
            context_length=setting.context_length,
            learning=True,
            drain_s=setting.drain_s,
        )
        return self._found(candidate, rate, run, device)

    def _planned(self, rate: float, part: int) -> list[PlannedRequest]:
        """Of the same requests at every rate."""
        setting = self.setting
        if not self._asks:
            self._asks = setting.workload.asks(setting.skip + setting.requests, setting.seed)[setting.skip :]
        due_s = setting.arrivals.due_s(self._asks, rate, setting.seed)
        count = max(len(due_s) // part, 1)
        return plan(self._asks[:count], due_s[:count])

    def _is_hopeless(self, short: Found) -> bool:
        """So many have missed that all others may be good and the rate does not hold; or, where requests come alike all the
        time, more than chance allows. A fleet that starts empty is never better for longer."""
        setting, misses = self.setting, sum(not good for good in short.point.good)
        allowed = (1 - setting.attainment) * (setting.requests - self._warmup)
        return misses > allowed or (setting.arrivals.kind != "trace" and short.clearly_failed(setting.attainment))

    def _found(self, candidate: Candidate, rate: float, run: Run, device: DeviceModel) -> Found:
        setting, warmup = self.setting, self._warmup
        counted = run.lifelines[warmup:]
        point = rate_point(rate, counted, setting.slo)
        prefill = frozenset(name for name, role in run.roles.items() if role is Role.PREFILL)
        ran = Ran(run.lifelines, run.choices, run.engines, prefill, device)
        used = uses(ran)
        return Found(
            point,
            summarize_run(str(candidate), rate, counted, setting.slo),
            causes(replace(ran, lifelines=counted, choices=run.choices[warmup:]), setting.slo, used),
            used,
            falls_behind(counted) is not None,
            _is_clear(point, setting.attainment),
        )

    @property
    def _warmup(self) -> int:
        """Requests, of a whole run and of its beginning alike."""
        return self.setting.requests // WARMUP

    def _device(self, tp: int, changes: Changes) -> DeviceModel:
        key = (tp, changes)
        if key not in self._devices:
            self._devices[key] = self.setting.device(tp, changes.assume)
        return self._devices[key]


def _is_clear(point: RatePoint, attainment: float) -> bool:
    if attainment == 1:
        return point.good_fraction < 1
    return clearly(sum(point.good), len(point.good), attainment, LEVEL) is not None
