"""What a policy may see: read-only protocols over the engine's live structures (no copies on the step path)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from pdmux_ray.types import Mode, Role, Split


class LengthsView(Protocol):
    """How long a request is, and how much room it has. In tokens and pages."""

    @property
    def known_tokens(self) -> int:
        """Prompt plus generated so far."""

    @property
    def held_pages(self) -> int: ...


class RequestView(LengthsView, Protocol):
    """A request as a policy sees it. Lengths in tokens."""

    @property
    def request_id(self) -> str: ...

    @property
    def arrival(self) -> int:
        """Order of arrival: smaller is older. Kept through preemptions."""

    @property
    def computed_tokens(self) -> int:
        """Tokens whose KV is in the request's pages. Always < known_tokens."""

    @property
    def ttft_deadline_s(self) -> float:
        """When its first token is due, on the engine's clock; infinite without a TTFT objective, or once the token is out."""

    @property
    def token_s(self) -> float:
        """When its last token came, on the engine's clock; before the first one, when it came itself."""

    @property
    def prefix_key(self) -> bytes | None:
        """Equal when the known tokens but the last are, as far as they fill pages. None without prefix cache."""

    @property
    def pinned(self) -> bool:
        """Never preempted: another instance reads its pages, so that nobody would get them."""

    @property
    def left_tokens(self) -> int:
        """That it may still generate: after so many it ends for certain. At least 1."""

    @property
    def deadline_s(self) -> float | None:
        """When it ends in any case, on the engine's clock."""

    @property
    def host_sampled(self) -> bool:
        """See `types.SamplingParams`."""

    @property
    def stops_early(self) -> bool:
        """Some tokens end it, whatever `left_tokens` says."""


class PrefixHit(Protocol):
    """What the prefix cache has for a waiting request."""

    @property
    def tokens(self) -> int:
        """Leading tokens already in cached pages (whole pages, always < known_tokens)."""

    @property
    def evictable_pages(self) -> int:
        """How many of those pages nobody holds now: taking them lowers `EngineView.free_pages`."""


class EngineView(Protocol):
    """One instance between two steps."""

    @property
    def page_size(self) -> int: ...

    @property
    def free_pages(self) -> int:
        """Pages that can be had now: free, or cached and held by nobody."""

    @property
    def decoding(self) -> Sequence[RequestView]:
        """Requests in phase DECODE, oldest arrival first."""

    @property
    def prefilling(self) -> Sequence[RequestView]:
        """Requests in phase PREFILL (they hold all pages of their known tokens), oldest arrival first."""

    @property
    def transferring(self) -> Sequence[RequestView]:
        """Requests in phase TRANSFER. They hold places in the batch, and all pages of their known tokens, or none while they
        wait for another one's fetch. Not preempted: nobody may have their pages before the peer has stopped writing there."""

    @property
    def waiting(self) -> Sequence[RequestView]:
        """Requests in phase QUEUED, in the order in which they should start."""

    def prefix_hit(self, request: RequestView) -> PrefixHit:
        """Looks up a waiting request's prefix. Changes nothing."""

    def pages_freed(self, requests: Sequence[RequestView]) -> int:
        """By how much `free_pages` would rise if all of these gave up their pages. Changes nothing.

        A shared page counts when everyone who holds it is among `requests`.
        """


class Piece(NamedTuple):
    """Tokens of one request that a prefill computes together, and how many before them have their KV already."""

    new_tokens: int
    prior_tokens: int


class Estimate(NamedTuple):
    """Of how long something takes. Seconds."""

    predicted_s: float  # the model's best guess
    bound_s: float  # measured times stay under it 99 times of 100


class CostModel(Protocol):
    """The measured latency model of (model, device), as policies use it. Every answer > 0.

    No more units are ever slower beside the same lane, among splits that are disjoint and among those that overlap; and more
    work is never faster. One that learns may break both for a while, where it was measured so: plans stay valid, but not always
    the best. Predictions are for any thread.
    """

    @property
    def switch_s(self) -> float:
        """What a change of the split costs, once."""

    def decode(self, batch: int, context_tokens: int, units: int, prefill_units: int) -> Estimate:
        """One decode step of `batch` requests with `context_tokens` in all, with a prefill on `prefill_units` beside it (0:
        none)."""

    def prefill(self, pieces: Sequence[Piece], layers: int, units: int, decode_units: int, last: bool) -> Estimate:
        """`layers` layers of a prefill, with decodes on `decode_units` beside it (0: none).

        `last`: the model's last layer is one of them, and brings the output head.
        """

    def mixed(self, batch: int, context_tokens: int, pieces: Sequence[Piece], units: int) -> Estimate:
        """A step of all layers that decodes and prefills in one pass (CHUNKED)."""


@runtime_checkable
class LearningCostModel(CostModel, Protocol):
    """One that corrects itself: it is told what each step took (the other arguments as in its predictions), by the step loop's
    thread alone."""

    def observe_decode(self, batch: int, context_tokens: int, units: int, prefill_units: int, seconds: float) -> None: ...

    def observe_prefill(
        self, pieces: Sequence[Piece], layers: int, units: int, decode_units: int, last: bool, seconds: float
    ) -> None: ...

    def observe_mixed(self, batch: int, context_tokens: int, pieces: Sequence[Piece], units: int, seconds: float) -> None: ...


class JobView(Protocol):
    """A prefill that runs layer by layer, block after block; it may rest between two blocks. Its requests hold their pages."""

    @property
    def job_id(self) -> int: ...

    @property
    def requests(self) -> Sequence[RequestView]: ...

    @property
    def pieces(self) -> Sequence[Piece]:
        """Aligned with `requests`."""

    @property
    def layers_done(self) -> int:
        """Without those of a block in flight."""

    @property
    def in_flight(self) -> bool:
        """A block of it is computing now: at most one job's is."""

    @property
    def ends_s(self) -> float | None:
        """When the block in flight is predicted to end; None without one, or without a prediction."""

    @property
    def overtaken(self) -> int:
        """How many jobs that began later have run before it: one more when such a job gets its first block."""


class LanesView(EngineView, Protocol):
    """An engine whose device has two lanes."""

    @property
    def now(self) -> float: ...

    @property
    def layers(self) -> int:
        """Of the model."""

    @property
    def units(self) -> int:
        """Of the device."""

    @property
    def splits(self) -> Sequence[Split]:
        """The disjoint ones, fewest decode units first."""

    @property
    def split(self) -> Split:
        """The one of the last step. While a block is in flight, its prefill units are the block's."""

    @property
    def mode(self) -> Mode:
        """Of the last step."""

    @property
    def mode_since_s(self) -> float:
        """When that mode began, on the engine's clock."""

    @property
    def jobs(self) -> Sequence[JobView]:
        """Those that have begun and are not done, in order of beginning. Their requests are in `prefilling`, too."""


class Queued(NamedTuple):
    """A prompt that is to be prefilled."""

    left_s: float  # until its first token is due; below 0: it is late; inf: nobody said when
    tokens: int


@dataclass(frozen=True, slots=True)
class InstanceView:
    """One instance as a gateway sees it: the newest load figures it was told, and what it has sent since."""

    instance_id: str
    running: int
    waiting: int
    free_pages: int
    step_age_s: float  # of the step under way when the figures were told; 0 without one
    silence_s: float  # since they were told
    on_their_way: int  # requests sent whose receipt the figures do not show yet
    line_is_up: bool  # False: there are no figures yet
    leaving: bool  # it takes no more requests, but ends those it has
    ailing: bool  # it says itself that it is not well
    role: Role = Role.MUX
    decode_batch: int = 0  # requests that decode
    decode_context_tokens: int = 0  # of those, all together
    queued_prefill_tokens: int = 0  # to be prefilled there, of requests that its figures show
    on_their_way_tokens: int = 0  # of prompts to be prefilled there that its figures do not show yet
    queue: tuple[Queued, ...] = ()  # of the prompts in both of these, those that the gateway has sent
    peers: frozenset[str] | None = None  # instances that it can fetch KV from now; None: from all

    def reaches(self, peer: InstanceView) -> bool:
        return self.peers is None or peer.instance_id in self.peers


@dataclass(frozen=True, slots=True)
class InstanceCosts:
    """What a prediction for an instance needs: the latency model of its device, and how it makes up its steps."""

    model: CostModel
    layers: int  # of the model
    units: int  # of the device
    # Prompt tokens that a step in one pass may compute beside the decodes (infinite: whole prompts); None with lanes, where a
    # prefill gets what the ITL objective leaves of the device.
    one_pass_tokens: float | None = None
