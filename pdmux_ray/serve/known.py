"""What a gateway knows of an instance, as its router sees it: the newest load figures, and what it has sent since.

Knows nothing of ray, lines or clocks: the simulator's gateway uses the same rules.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pdmux_ray.policy.views import InstanceView, Queued
from pdmux_ray.types import Load, Role

LOAD_PERIOD_S = 0.1  # figures of a load that changes are no older, also when no step has news for this gateway
HEARTBEAT_S = 1.0  # and in any case an instance says something so often
SHOWN_S = 0.05  # a prompt shows in the figures of who prefills it from so long on
SHOWN_THERE_S = 0.25  # and when it comes there by way of another instance


def peers_of(roles: Mapping[str, Role | None]) -> dict[str, frozenset[str]]:
    """From whom KV can be had, of each instance whose role is known: whoever decodes has it from those that prefill."""
    prefills = frozenset(name for name, role in roles.items() if role is Role.PREFILL)
    return {name: frozenset() if role is Role.PREFILL else prefills for name, role in roles.items() if role is not None}


class Promise(NamedTuple):
    """A prompt that an instance is to prefill. Seconds of the gateway's clock."""

    due_s: float  # its first token
    shown_s: float  # figures that come later show it
    tokens: int
    left: int  # of these, by the newest figures


class Promises:
    """What a gateway has an instance prefill, until the instance has done it.

    Nobody tells which ones are done: the instance's figures say how many tokens are left, and those due first are done first.
    """

    def __init__(self) -> None:
        self._made: list[Promise] = []  # by when they are due

    def make(self, tokens: int, now: float, left_s: float, there: bool) -> None:
        """`left_s`: until the first token is due. `there`: it comes by way of the instance that decodes."""
        insort(self._made, Promise(now + left_s, now + (SHOWN_THERE_S if there else SHOWN_S), tokens, tokens))

    def heard(self, tokens: int, now: float) -> None:
        """So many tokens are left to prefill there, by figures that come now. Forgets what must be done."""
        if not self._made:  # so it is with most figures
            return
        kept = []
        for promise in reversed(self._made):
            if promise.shown_s >= now:
                kept.append(promise)
            elif tokens > 0:
                kept.append(promise._replace(left=min(promise.tokens, tokens)))
                tokens -= promise.tokens
        self._made = kept[::-1]

    def open(self, load_s: float) -> int:
        """Tokens that figures which came at `load_s` may not show yet."""
        return sum([promise.tokens for promise in self._made if promise.shown_s >= load_s])

    def queue(self, now: float) -> tuple[Queued, ...]:
        return tuple([Queued(promise.due_s - now, promise.left) for promise in self._made])


@dataclass(frozen=True, slots=True)
class Standing:
    """What an instance has said of itself, and what is known of its line."""

    instance_id: str
    role: Role
    peers: frozenset[str] | None
    leaving: bool = False
    ailing: bool = False


def view_of(
    standing: Standing, load: Load | None, load_s: float, now: float, on_their_way: int, promises: Promises
) -> InstanceView:
    """For the routing policy. `load`: None until its line is up; `load_s`: when it came."""
    return InstanceView(
        instance_id=standing.instance_id,
        running=load.running if load else 0,
        waiting=load.waiting if load else 0,
        free_pages=load.free_pages if load else 0,
        step_age_s=load.step_age_s if load else 0.0,
        silence_s=now - load_s,
        on_their_way=on_their_way,
        line_is_up=load is not None,
        leaving=standing.leaving,
        ailing=standing.ailing,
        role=standing.role,
        decode_batch=load.decoding if load else 0,
        decode_context_tokens=load.decode_context_tokens if load else 0,
        queued_prefill_tokens=load.queued_prefill_tokens if load else 0,
        on_their_way_tokens=promises.open(load_s),
        queue=promises.queue(now),
        peers=standing.peers,
    )
