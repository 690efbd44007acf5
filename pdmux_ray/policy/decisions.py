"""What policies answer: frozen dataclasses with equality, each with its `Reason`.

A Reason's value is also the metric label, the log field and the simulator's column.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pdmux_ray.policy.views import Estimate
from pdmux_ray.types import Mode, Role, Split


class StepReason(Enum):
    """Why a step is what it is."""

    IDLE = "idle"  # nothing to do
    PREEMPT = "preempt"  # the decodes could not grow: the newest requests give up their pages, and nobody starts
    DECODE_ONLY = "decode_only"  # nobody is waiting
    DECODE_NO_PAGES = "decode_no_pages"  # someone is waiting, but there are no pages for them
    DECODE_BATCH_FULL = "decode_batch_full"  # someone is waiting, but max_batch requests are running
    DECODE_NO_BUDGET = "decode_no_budget"  # chunked: the decodes alone use up the token budget
    PREFILL_WHOLE = "prefill_whole"  # prefill_first: prompts run whole, decode waits
    CHUNK_ONLY = "chunk_only"  # chunked: prefill with no decodes beside it
    CHUNK_MIXED = "chunk_mixed"  # chunked: decodes and prefill share the token budget
    LANES_BOTH = "lanes_both"  # decodes on their lane, a prefill on the other
    LANES_PREFILL = "lanes_prefill"  # a prefill by layers; nobody decodes, or decodes wait for the units of the block in flight


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute known tokens [start, start + tokens) of a request."""

    request_id: str
    start: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Block:
    """Launch the layers up to `end_layer` of a job on the prefill lane: of one that has begun, or of a new one.

    A new job's requests are waiting ones, wherever in the queue (their chunk starts at the prefix hit), or ones that CHUNKED
    steps have begun (it starts at their computed tokens).
    """

    job_id: int | None  # None: a new job of `chunks`; each request's chunk reaches its last known token
    chunks: tuple[Chunk, ...]  # empty with a job_id
    end_layer: int


class ModeReason(Enum):
    """Why a step shares the device as it does (which split, which mode)."""

    CONFIGURED = "configured"  # units and layers are fixed by the configuration (policy fixed)
    NO_PREFILL = "no_prefill"  # nobody is prefilled: the decodes have every unit
    NO_DECODE = "no_decode"  # nobody decodes: the prefill has every unit
    FITS = "fits"  # the configured mode, with as much for the prefill as the ITL objective allows by the bound
    BEST_EFFORT = "best_effort"  # no way has a bound that keeps the ITL objective
    SLACK = "slack"  # AUTO: fewest misses are expected of it; its bound keeps the ITL objective, and the first token is in time
    LATE = "late"  # AUTO: as SLACK, but the first token will be late
    RISK = "risk"  # AUTO: more misses are expected of all whose bound keeps the ITL objective than of this one, whose does not
    DWELL = "dwell"  # another one would be better, but the last change is too recent
    HELD = "held"  # a block in flight keeps its units: nothing changes before it ends
    TABLE = "table"  # the published rule by decode batch size


class BurstReason(Enum):
    """Why the device is given so many decode steps at once."""

    FULL = "full"  # as many as it takes
    ENDS = "ends"  # then a request will have ended, by its tokens or its deadline
    ARRIVALS = "arrivals"  # whoever comes meanwhile waits for the last one
    BLOCK = "block"  # then the block beside ends
    PAGES = "pages"  # there are pages for so many, without taking anybody's
    JOINS = "joins"  # one: somebody waits or is fetched, or is prefilled with no block beside, and decodes with the next one
    HOST = "host"  # one: the host samples, because of what a request asks for
    NO_MODEL = "no_model"  # one: how long an arrival would wait cannot be said without a latency model


@dataclass(frozen=True, slots=True)
class LaneUse:
    """How a step uses a device with lanes.

    Of a device with U units, a step without prefill has the split (0, U), one without decodes (U, 0), TIME_SHARED (U, U).
    """

    mode: Mode
    split: Split
    why: ModeReason
    block: Block | None = None  # what the prefill lane is given now; None: nothing (it may still be busy)
    decode_s: Estimate | None = None  # of this step's decodes; None without a latency model
    block_s: Estimate | None = None  # of the block
    wait_s: float = 0.0  # that the step may wait, after its decodes, for a block that is due by then


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step does (a burst of them, when its decodes are by themselves or beside a block), in this order: preempt, start
    requests, then run decode and prefill together. Estimates are of one step."""

    reason: StepReason
    decode: tuple[str, ...] = ()  # requests that compute their newest token and sample the next
    prefill: tuple[Chunk, ...] = ()  # in one pass with the decodes; a chunk of a waiting request starts it
    preempt: tuple[str, ...] = ()  # newest first: each gives up its pages and goes to the head of the queue
    lanes: LaneUse | None = None  # None: every unit works on `decode` and `prefill` together
    why: ModeReason | None = None  # without `lanes`: why it is one pass, when there was a choice
    step_s: Estimate | None = None  # without `lanes`: of the step; None without a latency model
    steps: int = 1  # decode steps that the device is given at once, a burst; more than one only without `prefill`
    burst: BurstReason | None = None  # why so many; None when there was no choice

    @property
    def estimates(self) -> list[Estimate]:
        """Of all that the device is given in this step; empty without a latency model."""
        use = self.lanes
        found = (self.step_s,) if use is None else (use.decode_s, use.block_s)
        return [estimate for estimate in found if estimate is not None]


class FetchReason(Enum):
    """Why the KV of a prompt is fetched from a peer, or the prompt prefilled here although there is one."""

    ROOM = "room"  # there are pages and a place for it: fetched
    SHARED = "shared"  # the KV of an equal prompt is on its way: waits until that has landed or is lost, and is looked at anew
    CACHED = "cached"  # the prefix cache has all but a part of a page
    TOO_LATE = "too_late"  # it waited for pages or a place until its fetch was due
    OVERTAKEN = "overtaken"  # a plan started it here first, out of order


@dataclass(frozen=True, slots=True)
class FetchChoice:
    """What happens to a waiting request that has a peer. It is fetched with the reason ROOM, and only with it."""

    request_id: str
    reason: FetchReason


class AdmitReason(Enum):
    """Why a new request is accepted or refused."""

    IN_TIME = "in_time"  # its first token is predicted within the objective
    LATE = "late"  # it is not: refused
    LONG = "long"  # it would be late on an idle instance, too, so that to come again would not help: accepted


@dataclass(frozen=True, slots=True)
class Admission:
    """Whether a new request is taken in. `retry_after_s` is positive exactly when it is refused."""

    accept: bool
    predicted_ttft_s: float
    retry_after_s: float
    reason: AdmitReason


class Unfit(Enum):
    """Why an instance is given no requests."""

    NO_LINE = "no_line"  # its line is not up yet
    SILENT = "silent"  # nothing has come from it for too long
    STALLED = "stalled"  # the step under way takes too long
    AILING = "ailing"  # it says so itself
    LEAVING = "leaving"  # it is well, but about to end


class RouteReason(Enum):
    """Why a request went to its instance, or to none, and where it is prefilled."""

    ONLY_ONE = "only_one"  # a single instance can take requests
    LEAST_LOADED = "least_loaded"  # it has the fewest requests, counted with those still on their way
    PREFIX = "prefix"  # of those with the fewest requests, it has most of the prompt cached
    TIE = "tie"  # several are equal in all that; one was drawn
    LOCAL = "local"  # predicted: the objectives are kept, cheapest by prefilling where it decodes
    REMOTE = "remote"  # predicted: the objectives are kept, cheapest by fetching from a prefill instance
    LATE = "late"  # predicted: an objective is missed whatever is done; this way delays others least
    SHORT = "short"  # threshold: not enough is left to prefill for a fetch
    LONG = "long"  # threshold: enough is
    ALWAYS = "always"  # policy remote
    CACHED = "cached"  # the decode instance has all that could be fetched
    NO_MODEL = "no_model"  # policy predict, without a latency model of some instance: by load alone
    NO_PREFILL_FIT = "no_prefill_fit"  # to be prefilled elsewhere, but no such instance can take requests: it is local
    NO_DECODE_FIT = "no_decode_fit"  # only prefill instances can take requests: one serves all of it
    NONE_LINKED = "none_linked"  # no instance is known
    NONE_FIT = "none_fit"  # there are instances, but none can take requests


@dataclass(frozen=True, slots=True)
class RouteChoice:
    """Which instance serves a request; None with the reasons NONE_LINKED and NONE_FIT, and only with them."""

    instance_id: str | None
    reason: RouteReason
    prefill: tuple[str, ...] = ()  # instances to fetch the prompt's KV from, best first; empty: prefilled where it decodes
    predicted_ttft_s: float | None = None  # None without a prediction


class PlacementReason(Enum):
    """Why the roles of a fleet are changed, or left as they are."""

    STALE = "stale"  # the newest figures are too old, or there are none: nothing is done
    FEW = "few"  # there are not two instances to choose between
    PENDING = "pending"  # an instance has not taken the role yet that it was given
    PINNED = "pinned"  # an instance gets the role that its operator has fixed
    BOUNDS = "bounds"  # there are more or fewer of a role than allowed
    CALM = "calm"  # no side is busy
    BALANCED = "balanced"  # no other ratio is better by the margin
    CONFIRMING = "confirming"  # another one is, but not for long enough
    COOLING = "cooling"  # another one is, but the last change went the other way and is too recent
    MORE_PREFILL = "more_prefill"  # instances begin to prefill
    MORE_DECODE = "more_decode"  # instances that prefilled begin to decode


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """The roles that instances should have, and which of them are to be given another one now. With no other reason than
    PINNED, BOUNDS, MORE_PREFILL and MORE_DECODE are there any changes."""

    reason: PlacementReason
    roles: tuple[tuple[str, Role], ...]  # of every instance, by its id; also where a change still waits
    changes: tuple[tuple[str, Role], ...] = ()
    replicas: int | None = None  # instances that there should be; None: that is not for it to say
