"""The gateway of a simulated fleet: routes requests as a server's gateway does, and notes their lifelines."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from pdmux_ray.engine.pages import Hashed
from pdmux_ray.errors import PdmuxError
from pdmux_ray.metrics.lifeline import Lifeline
from pdmux_ray.policy.decisions import RouteChoice
from pdmux_ray.serve.known import Promises, Standing, peers_of, view_of
from pdmux_ray.serve.router import Candidate, Device, Router, bandwidth_of
from pdmux_ray.sim.events import World
from pdmux_ray.sim.instance import FIGURES_PERIOD_S, SimInstance
from pdmux_ray.sim.streak import Streak
from pdmux_ray.sim.transfers import Transfers
from pdmux_ray.types import FinishReason, Load, NewRequest, Role, SamplingParams, TokenEvent
from pdmux_ray.workload.requests import PlannedRequest


@dataclass(slots=True)
class _Known:
    """What it knows of an instance."""

    standing: Standing
    device: Device
    load: Load | None = None
    load_s: float = 0.0
    on_their_way: int = 0
    promises: Promises = field(default_factory=Promises)


@dataclass(slots=True)
class Sent:
    """One request, and which way it went."""

    lifeline: Lifeline
    choice: RouteChoice


class SimGateway:
    """Each message to or from an instance takes `line_s`."""

    def __init__(self, world: World, router: Router, line_s: float, timeout_s: float) -> None:
        """`timeout_s`: of a request, from its arrival to its last token."""
        self.sent: dict[str, Sent] = {}  # by request id, in order of arrival
        self.open = 0  # requests that have not ended
        self._world = world
        self._router = router
        self._line_s = line_s
        self._timeout_s = timeout_s
        self._instances: Mapping[str, SimInstance] = {}
        self._known: dict[str, _Known] = {}
        self._bandwidth: float | None = None  # between two instances, bytes a second; None: not measured yet

    def meet(self, instances: Sequence[SimInstance], device: Device, transfers: Transfers) -> None:
        """All of the fleet, alike. `transfers`: between them."""
        self._instances = {instance.name: instance for instance in instances}
        for instance in instances:
            self._known[instance.name] = _Known(Standing(instance.name, instance.role, frozenset()), device)
        self.take_roles({instance.name: instance.role for instance in instances})
        self._hear_writes(transfers)

    def _hear_writes(self, transfers: Transfers) -> None:
        """As often as served instances tell of them."""
        self._bandwidth = bandwidth_of(transfers.figures())
        self._world.after(FIGURES_PERIOD_S, partial(self._hear_writes, transfers))

    def take_roles(self, roles: Mapping[str, Role]) -> None:
        """Of all instances."""
        for name, peers in peers_of(roles).items():
            self._known[name].standing = Standing(name, roles[name], peers)

    def hear(self, name: str, load: Load, events: Sequence[TokenEvent]) -> None:
        """News as they leave an instance."""
        self._world.after(self._line_s, partial(self._take, name, load, events))

    def hear_streak(self, name: str, streak: Streak) -> None:
        """Steps that were alike have ended."""
        self._world.after(self._line_s, partial(self._take_streak, name, streak))

    def close(self, now: float) -> None:
        """The simulation ends amid steps that are alike: what they have told so far."""
        for instance in self._instances.values():
            instance.settle(math.nextafter(now, math.inf))
            for streak in instance.untold:
                self._note_tokens(streak, streak.heard_before(math.nextafter(now, math.inf), self._line_s))

    def arrive(self, planned: PlannedRequest) -> None:
        """A request comes. Its prompt is of token ids."""
        now, prompt, asked = self._world.now(), planned.ask.prompt, planned.ask.output_tokens
        assert isinstance(prompt, tuple)
        assert asked is not None
        prompt = Hashed(prompt)
        choice, tokens = self._router.choose(prompt, self._candidates(), self._bandwidth)
        lifeline = Lifeline(now, now, prompt_tokens=len(prompt), asked_tokens=asked)
        name = str(planned.index)
        self.sent[name] = Sent(lifeline, choice)
        if choice.instance_id is None:
            lifeline.fail(now, f"no instance: {choice.reason.value}")
            return
        self.open += 1
        known = self._known[choice.instance_id]
        known.on_their_way += 1
        prefills = self._known[choice.prefill[0] if choice.prefill else choice.instance_id]
        prefills.promises.make(tokens, now, self._router.left_s(choice, len(prompt)), bool(choice.prefill))
        params = SamplingParams(max_tokens=asked, ignore_eos=True)
        new = NewRequest(name, prompt, params, deadline_s=now + self._timeout_s, prefill_peers=choice.prefill)
        self._world.after(self._line_s, partial(self._submit, choice.instance_id, new))

    def _candidates(self) -> dict[str, Candidate]:
        now, found = self._world.now(), {}
        for name, known in self._known.items():
            self._catch_up(name, known, now)
            view = view_of(known.standing, known.load, known.load_s, now, known.on_their_way, known.promises)
            pages = known.load.total_pages if known.load else 0
            found[name] = Candidate(view, known.device, pages, dict(self._instances[name].figures))
        return found

    def _catch_up(self, name: str, known: _Known, now: float) -> None:
        """What has come of steps that are alike, nobody has told."""
        for streak in reversed(self._instances[name].untold):
            newest = streak.newest(now, self._line_s)
            if newest is not None:
                load, left_s = newest
                if left_s + self._line_s > known.load_s:
                    self._learn(known, load, left_s + self._line_s)
                return

    def _submit(self, name: str, new: NewRequest) -> None:
        """At the instance."""
        instance = self._instances[name]
        refusal, load = instance.submit(new), instance.engine.load()
        self._world.after(self._line_s, partial(self._answered, name, new.request_id, refusal, load))

    def _answered(self, name: str, request_id: str, refusal: PdmuxError | None, load: Load) -> None:
        self._take(name, load, ())
        self._known[name].on_their_way -= 1
        if refusal is not None:
            self._end(request_id).fail(self._world.now(), str(refusal))

    def _take_streak(self, name: str, streak: Streak) -> None:
        self._instances[name].untold.remove(streak)
        self._note_tokens(streak, len(streak.ends_s))
        assert streak.after is not None
        self._take(name, streak.after, ())

    def _note_tokens(self, streak: Streak, steps: int) -> None:
        token_s = array("d", [end_s + self._line_s for end_s in streak.ends_s[:steps]])
        for request_id in streak.requests:
            self.sent[request_id].lifeline.tokens_came(token_s)

    def _learn(self, known: _Known, load: Load, now: float) -> None:
        known.load, known.load_s = load, now
        known.promises.heard(load.queued_prefill_tokens, now)

    def _take(self, name: str, load: Load, events: Sequence[TokenEvent]) -> None:
        now = self._world.now()
        self._learn(self._known[name], load, now)
        for event in events:
            lifeline = self.sent[event.request_id].lifeline
            if event.token is not None:
                lifeline.tokens_arrived(now)
            if event.finish is FinishReason.ERROR:
                self._end(event.request_id).fail(now, event.error or "")
            elif event.finish is not None:
                self._end(event.request_id).complete(now, event.finish.value)

    @property
    def ended(self) -> int:
        """Requests."""
        return len(self.sent) - self.open

    def _end(self, request_id: str) -> Lifeline:
        self.open -= 1
        return self.sent[request_id].lifeline
