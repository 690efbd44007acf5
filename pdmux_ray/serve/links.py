"""Links to the instances, of a gateway or of the placement controller: finds them, keeps a line to each, hands each token to
whoever waits for it.

Knows nothing of ray: who lists the instances is given to it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pdmux_ray.errors import InstanceUnavailableError, RequestError
from pdmux_ray.policy.decisions import RouteChoice, Unfit
from pdmux_ray.policy.routing import FitnessLimits, unfit
from pdmux_ray.policy.views import InstanceView
from pdmux_ray.serve import wire
from pdmux_ray.serve.channel import Line
from pdmux_ray.serve.known import Promises, Standing, peers_of, view_of
from pdmux_ray.serve.mailbox import Mailbox
from pdmux_ray.serve.placer import Seen
from pdmux_ray.serve.router import Candidate, Device, Router, bandwidth_of
from pdmux_ray.types import Load, NewRequest, Role

SEEKING_PERIOD_S = 0.5  # discovery while an instance is missing
WATCH_PERIOD_S = 1.0  # an instance that hangs at two looks in a row is hung up on, when it has requests that another could take

BEGIN_S = 30.0  # after its begin a gateway says rather that it does not know all instances yet than that there are no more

MIN_RETRY_S, MAX_RETRY_S = 0.5, 30.0  # before a line that did not last is tried again; doubles with each failure

# Seconds to wait at most -> what each instance says of itself (`Instance.describe`), or the error it answered with.
DescribeAll: TypeAlias = Callable[[float], Awaitable[Sequence[Any]]]

log = logging.getLogger("ray.serve")


class Link:
    """One instance as this gateway knows it. Owner: the gateway's event loop."""

    def __init__(self, description: dict[str, Any], on_role: Callable[[], None]) -> None:
        """`on_role` is called when its role is heard first, and when it changes."""
        self.instance_id: str = description["instance_id"]
        self.context_length: int = description["context_length"]
        self.vocab_size: int = description["vocab_size"]
        self.max_waiting: int = description["max_waiting"]
        self.ailing: bool = description["ailing"]  # the engine's own word, of the last discovery round
        self.rank: int = description["rank"]  # of the topology's instances; Serve may give it anew
        self.device = Device.of(description)
        self.kv_address: str | None = description["kv_address"]
        self.metrics_address: str = description["metrics_address"]
        self.role: Role | None = None  # None until the line is up
        self.peers: frozenset[str] = frozenset()  # instances that it can get KV from
        self.load: Load | None = None  # None until the line is up
        self.since_s = self.load_s = time.monotonic()  # load_s: when `load` came
        self.on_their_way = 0  # requests in a submit that is not answered yet
        self.leaving = False
        self.figures: wire.Figures = {}  # the engine's counters, about a second old
        self.line = Line(self)
        self._on_role = on_role
        self._promises = Promises()
        self._mailboxes: dict[str, tuple[Mailbox, int]] = {}  # request id -> (mailbox, choice index)

    def on_step(self, load: wire.PackedLoad, events: Sequence[wire.Event]) -> None:
        """Once per step: the hot path. Events of requests that nobody waits for any more are dropped."""
        self.load = wire.unpack_load(load)
        self.load_s = time.monotonic()
        self._promises.heard(self.load.queued_prefill_tokens, self.load_s)
        mailboxes = self._mailboxes
        for event in events:
            target = mailboxes.pop(event[0], None) if wire.is_last(event) else mailboxes.get(event[0])
            if target is not None:
                target[0].put(target[1], event)

    def on_figures(self, figures: wire.Figures) -> None:
        self.figures = figures

    def on_leaving(self) -> None:
        self.leaving = True

    def on_standing(self, standing: wire.PackedStanding) -> None:
        before, self.role = self.role, Role(standing[0])
        self.peers = frozenset(standing[1])
        if self.role is not before:
            self._on_role()

    def promise(self, tokens: int, left_s: float, there: bool) -> None:
        """See `Promises.make`."""
        self._promises.make(tokens, time.monotonic(), left_s, there)

    def view(self) -> InstanceView:
        """For the routing policy."""
        standing = Standing(self.instance_id, self.role or Role.MUX, self.peers, self.leaving, self.ailing)
        return view_of(standing, self.load, self.load_s, time.monotonic(), self.on_their_way, self._promises)

    def candidate(self) -> Candidate:
        return Candidate(self.view(), self.device, self.load.total_pages if self.load else 0, self.figures)

    def seen(self, limits: FitnessLimits) -> Seen:
        """For the placement."""
        fit, device = unfit(self.view(), limits) is None, self.device
        return Seen(
            self.instance_id, self.rank, self.role, self.load, self.load_s, device.layers, device.units, fit, self.figures
        )

    def trouble(self, limits: FitnessLimits) -> str | None:
        """Why it is given no requests, in words that a client may read; None when it is."""
        view = self.view()
        match unfit(view, limits):
            case Unfit.NO_LINE:
                return f"its line is not up yet, for {view.silence_s:.1f} s"
            case Unfit.SILENT:
                return f"no word from it for {view.silence_s:.1f} s"
            case Unfit.STALLED:
                return f"the step under way has taken {view.step_age_s + view.silence_s:.1f} s"
            case Unfit.AILING:
                return "its engine is not well; its log says why"
            case Unfit.LEAVING:
                return "it is leaving"
        return None

    async def submit(self, requests: Mapping[int, NewRequest], mailbox: Mailbox, left_s: float) -> None:
        """Requests by choice index: all or none; the engine ends them after `left_s`. Raises what it refuses with, or
        InstanceUnavailableError."""
        ids = [request.request_id for request in requests.values()]
        self._mailboxes.update((request.request_id, (mailbox, index)) for index, request in requests.items())
        self.on_their_way += len(ids)
        try:
            refusal = await self.line.submit(wire.pack_submission(list(requests.values()), left_s))
            if refusal is not None:
                raise wire.unpack_refusal(refusal)
        except BaseException:
            self.abort(ids)
            raise
        finally:
            self.on_their_way -= len(ids)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ends requests; returns before the instance knows."""
        for request_id in request_ids:
            self._mailboxes.pop(request_id, None)
        if request_ids:
            self.line.abort(request_ids)

    @property
    def busy(self) -> bool:
        """Whether it has requests that are not finished."""
        return bool(self._mailboxes)

    def fail(self) -> int:
        """The line is down for good. How many requests were on it."""
        lost = len(self._mailboxes)
        for mailbox, _ in self._mailboxes.values():
            mailbox.fail(InstanceUnavailableError("The instance that served this request went away. Send it again."))
        self._mailboxes.clear()
        return lost


@dataclass(frozen=True, slots=True)
class _Failure:
    """How the line to an instance ended last."""

    why: str
    retry_s: float
    again_s: float  # when it may be tried again


class Links:
    """All links of one gateway. Owner: its event loop."""

    def __init__(self, describe_all: DescribeAll, gateway_id: str, discovery_period_s: float, router: Router) -> None:
        self.by_id: dict[str, Link] = {}
        self.gateway_id = gateway_id
        self._describe_all = describe_all
        self._period_s = discovery_period_s
        self._instances = router.instances
        self._limits = router.limits
        self._router = router
        self._failures: dict[str, _Failure] = {}  # by instance id
        self._tasks: set[asyncio.Task[None]] = set()
        self._since_s = time.monotonic()

    def start(self) -> None:
        self._keep(asyncio.create_task(self._discover()))
        self._keep(asyncio.create_task(self._watch()))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def loads(self) -> dict[str, Load]:
        """Instance id -> its newest load figures. From any thread."""
        return {link.instance_id: link.load for link in list(self.by_id.values()) if link.load is not None}

    def figures(self) -> dict[str, wire.Figures]:
        """Instance id -> its other figures."""
        return {link.instance_id: link.figures for link in self.by_id.values()}

    async def metrics_addresses(self, timeout_s: float) -> dict[str, str]:
        """Instance id -> where it tells all of its figures: of those that are linked, and of those that discovery lists within
        `timeout_s`. Raises InstanceUnavailableError when this gateway has just begun and does not know all."""
        listed = [each for each in await self._describe_all(timeout_s) if isinstance(each, dict)]
        found = {each["instance_id"]: each["metrics_address"] for each in listed}
        found |= {link.instance_id: link.metrics_address for link in self.by_id.values()}
        if len(found) < self._instances and time.monotonic() - self._since_s < BEGIN_S:
            raise InstanceUnavailableError(
                f"This gateway has just begun and knows {len(found)} of {self._instances} instances. Ask again soon."
            )
        return found

    def context_length(self) -> int | None:
        """Tokens, as the instances say; None while none is linked."""
        return min((link.context_length for link in self.by_id.values()), default=None)

    def troubles(self) -> dict[str, str]:
        """Instance id -> why it is given no requests, for those that are not; and under "missing", if any are not linked."""
        found = {link.instance_id: link.trouble(self._limits) for link in self.by_id.values()}
        if len(self.by_id) < self._instances:
            found["missing"] = f"{len(self.by_id)} of {self._instances} instances are linked"
        return {instance_id: why for instance_id, why in found.items() if why is not None}

    def open(self) -> bool:
        """Whether `choose` finds an instance now."""
        return any(unfit(link.view(), self._limits) is None for link in self.by_id.values())

    def choose(self, prompts: Sequence[Sequence[int]], avoid: Collection[str] = ()) -> tuple[Link, RouteChoice]:
        """For the prompts of a request, which all go one way. `avoid`: instances that are not to be chosen. Raises
        InstanceUnavailableError that says what is wrong with each."""
        candidates = {name: link.candidate() for name, link in self.by_id.items() if name not in avoid}
        longest = max(prompts, key=len)
        choice, tokens = self._router.choose(longest, candidates, bandwidth_of(self.figures().values()))
        if choice.instance_id is None:
            raise InstanceUnavailableError(f"No instance can take requests now ({self._summary()}). Try again soon.")
        prefills = choice.prefill[0] if choice.prefill else choice.instance_id
        left_s = self._router.left_s(choice, len(longest))
        self.by_id[prefills].promise(tokens + sum(map(len, prompts)) - len(longest), left_s, bool(choice.prefill))
        return self.by_id[choice.instance_id], choice

    def seen(self) -> list[Seen]:
        """All instances, for the placement."""
        return [link.seen(self._limits) for link in self.by_id.values()]

    def listing(self) -> list[dict[str, Any]]:
        """All instances, for people."""
        return [
            {
                "id": link.instance_id,
                "role": (link.role or Role.MUX).value,
                "running": link.load.running if link.load else 0,
                "waiting": link.load.waiting if link.load else 0,
                "peers": sorted(link.peers),
                "kv_address": link.kv_address,
                "trouble": link.trouble(self._limits) or "",
            }
            for link in self.by_id.values()
        ]

    async def assign(self, instance_id: str, role: str) -> None:
        """Gives an instance another role. Raises RequestError when that cannot be, InstanceUnavailableError."""
        link = self.by_id.get(instance_id)
        if link is None:
            raise RequestError(
                f"There is no instance {instance_id!r}; there are: {', '.join(self.by_id) or 'none'}.", "instance"
            )
        refusal = await link.line.assume(role)
        if refusal is not None:
            raise wire.unpack_refusal(refusal)

    def _introduce(self) -> None:
        """Tells those that decode from whom KV can be had, so that they are linked before a request needs it."""
        addresses = {link.instance_id: link.kv_address for link in self.by_id.values() if link.kv_address}
        for name, peers in peers_of({name: self.by_id[name].role for name in addresses}).items():
            self.by_id[name].line.name_peers({peer: addresses[peer] for peer in sorted(peers)})

    def _summary(self) -> str:
        if not self.by_id:
            return "none is linked"
        return "; ".join(f"{instance_id}: {why}" for instance_id, why in self.troubles().items())

    async def _discover(self) -> None:
        while True:
            try:
                for answer in await self._describe_all(max(2.0, 2 * self._period_s)):
                    if isinstance(answer, dict):
                        self._meet(answer)
                self._introduce()
            except Exception as error:  # there is no replica yet, say; the lines themselves show who is well
                log.debug("Listing the instances failed: %r", error)
            complete = len(self.by_id) >= self._instances
            await asyncio.sleep(self._period_s if complete else min(self._period_s, SEEKING_PERIOD_S))

    async def _watch(self) -> None:
        """An instance that hangs loses its line, so that its requests go on elsewhere. Where there is no other they wait."""
        hung: set[Link] = set()
        while True:
            await asyncio.sleep(WATCH_PERIOD_S)
            links = self.by_id.values() if self.open() else ()
            hangs = {link for link in links if link.busy and unfit(link.view(), self._limits) in (Unfit.SILENT, Unfit.STALLED)}
            for link in hangs & hung:
                log.warning(
                    "Instance %s hangs: %s. Its requests go on elsewhere.", link.instance_id, link.trouble(self._limits)
                )
                link.line.hang_up()
            hung = hangs

    def _meet(self, description: dict[str, Any]) -> None:
        instance_id = description["instance_id"]
        link = self.by_id.get(instance_id)
        if link is not None:
            link.ailing, link.rank = description["ailing"], description["rank"]
            return
        failure = self._failures.get(instance_id)
        if failure is None or time.monotonic() >= failure.again_s:
            link = self.by_id[instance_id] = Link(description, self._introduce)
            self._keep(asyncio.create_task(self._follow(link, *description["address"])))

    async def _follow(self, link: Link, host: str, port: int, token: str) -> None:
        """Until the line ends. Discovery links the instance again if it is still there."""
        why = "this gateway stops"
        try:
            await link.line.listen(host, port, token, self.gateway_id)
        except Exception as error:  # a peer that speaks nonsense may cause any
            why = str(error) if isinstance(error, ConnectionError) else repr(error)
        finally:
            del self.by_id[link.instance_id]
            self._router.keep_only(self.by_id)
            self._put_off(link, why, link.fail())

    def _put_off(self, link: Link, why: str, failed: int) -> None:
        """Notes a line's end. An instance whose lines do not last is tried less and less often, and logged once per reason."""
        now_s = time.monotonic()
        last = self._failures.get(link.instance_id)
        if last is not None and now_s - link.since_s > MAX_RETRY_S:
            last = None
        if failed or last is None or last.why != why:
            log.warning("The line to instance %s is lost (%s), and %d requests with it.", link.instance_id, why, failed)
        retry_s = min(2 * last.retry_s, MAX_RETRY_S) if last is not None else MIN_RETRY_S
        recent = {key: failure for key, failure in self._failures.items() if now_s < failure.again_s + 2 * MAX_RETRY_S}
        self._failures = recent | {link.instance_id: _Failure(why, retry_s, now_s + retry_s)}

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
