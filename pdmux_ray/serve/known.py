"""What a gateway knows of an instance, as its router sees it: the newest load figures, and what it has sent since.

Knows nothing of ray, lines or clocks: the simulator's gateway uses the same rules.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from pdmux_ray.policy.views import InstanceView
from pdmux_ray.types import Load, Role

LOAD_PERIOD_S = 0.1  # figures of a load that changes are no older, also when no step has news for this gateway
SHOWN_S = 0.25  # a prompt shows in the figures of who prefills it from so long on: it may come there by way of another instance


class Promises:
    """Tokens that an instance is to prefill, by way of whatever instance they come there, and that its figures may not show."""

    def __init__(self) -> None:
        self._made: deque[tuple[float, int]] = deque()  # (when, tokens)

    def make(self, tokens: int, now: float) -> None:
        self._made.append((now, tokens))

    def open(self, load_s: float) -> int:
        """Tokens that figures of `load_s` do not show yet. Never ask with an earlier time again."""
        while self._made and self._made[0][0] + SHOWN_S < load_s:
            self._made.popleft()
        return sum([tokens for _, tokens in self._made])


@dataclass(frozen=True, slots=True)
class Standing:
    """What an instance has said of itself, and what is known of its line."""

    instance_id: str
    role: Role
    peers: frozenset[str] | None
    leaving: bool = False
    ailing: bool = False


def view_of(
    standing: Standing, load: Load | None, silence_s: float, on_their_way: int, on_their_way_tokens: int
) -> InstanceView:
    """For the routing policy. `load`: None until its line is up."""
    return InstanceView(
        instance_id=standing.instance_id,
        running=load.running if load else 0,
        waiting=load.waiting if load else 0,
        free_pages=load.free_pages if load else 0,
        step_age_s=load.step_age_s if load else 0.0,
        silence_s=silence_s,
        on_their_way=on_their_way,
        line_is_up=load is not None,
        leaving=standing.leaving,
        ailing=standing.ailing,
        role=standing.role,
        decode_batch=load.decoding if load else 0,
        decode_context_tokens=load.decode_context_tokens if load else 0,
        queued_prefill_tokens=load.queued_prefill_tokens if load else 0,
        on_their_way_tokens=on_their_way_tokens,
        peers=standing.peers,
    )
