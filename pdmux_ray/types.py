"""The project's vocabulary as types. Stdlib only; knows nothing of torch, ray, HTTP or text.

Lengths are counted in tokens, times in seconds; a name carries its unit where the type does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

from pdmux_ray.errors import RequestError


class Phase(Enum):
    """Where a request is in its life. `LEGAL_MOVES` is the only table of legal changes."""

    QUEUED = "queued"  # accepted, holds no pages (also after a preemption)
    PREFILL = "prefill"  # holds pages; at least one known token is not computed yet
    TRANSFER = "transfer"  # holds pages; KV of its prompt is on its way into them from another instance
    DECODE = "decode"  # every known token but the newest is computed
    DONE = "done"  # final: finished by a stop condition, or aborted by its client
    FAILED = "failed"  # final: ended by an error that its client was told


LEGAL_MOVES: Mapping[Phase, frozenset[Phase]] = MappingProxyType(
    {
        Phase.QUEUED: frozenset({Phase.PREFILL, Phase.TRANSFER, Phase.DONE, Phase.FAILED}),
        Phase.PREFILL: frozenset({Phase.DECODE, Phase.QUEUED, Phase.DONE, Phase.FAILED}),
        Phase.TRANSFER: frozenset({Phase.DECODE, Phase.QUEUED, Phase.DONE, Phase.FAILED}),
        Phase.DECODE: frozenset({Phase.QUEUED, Phase.DONE, Phase.FAILED}),
        Phase.DONE: frozenset(),
        Phase.FAILED: frozenset(),
    }
)


class Mode(Enum):
    """How the two phases share the device in a step."""

    PREFILL_FIRST = "prefill_first"  # a prefill runs whole, decode waits
    CHUNKED = "chunked"  # a token budget per step; prefill chunks ride with the decodes
    TIME_SHARED = "time_shared"  # a decode step, then a block of a prefill's layers, each on every unit
    SPLIT = "split"  # both at once, on disjoint units
    CAPPED = "capped"  # both at once: the prefill on some units, the decode on every one
    AUTO = "auto"  # one of the others for every step, by expected misses; never itself the mode of a step


ONE_PASS_MODES = (Mode.PREFILL_FIRST, Mode.CHUNKED)  # every unit works on one batch; no lanes needed


@dataclass(frozen=True, slots=True)
class Split:
    """How many units each lane has. Disjoint when they add up to the device's at most; more than that overlaps (CAPPED)."""

    prefill_units: int
    decode_units: int


class Role(StrEnum):
    """What an instance is for. Every engine can do everything: a role says what it is given."""

    MUX = "mux"  # decodes, and prefills what it decodes, both at once
    PREFILL = "prefill"  # prefills for others; decodes only when no other instance can
    DECODE = "decode"  # decodes; prefills only what no prefill instance can


# Where prompts are prefilled: `gateway.routing.policy` of the configuration, carried out in `policy.routing`.
RoutePolicy: TypeAlias = Literal["predict", "threshold", "local", "remote"]


class FinishReason(Enum):
    """Why a request ended; the values are OpenAI's `finish_reason` where it has one."""

    STOP = "stop"  # end-of-sequence token, stop token id or stop string
    LENGTH = "length"  # max_tokens or the context length
    ABORT = "abort"  # its client went away or asked for it
    ERROR = "error"


MAX_LOGPROBS = 20

# (field, lowest, highest), both allowed.
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 1, 2**31 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("temperature", 0.0, 2.0),
    ("top_p", 1e-6, 1.0),
    ("top_k", 0, 2**31 - 1),
    ("min_p", 0.0, 1.0),
    ("seed", 0, 2**63 - 1),
    ("repetition_penalty", 0.01, 10.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop. A value out of range raises RequestError.

    `seed` is always set (the gateway draws one when the client gave none): the random number of a token is a
    function of (seed, position) alone, so a request can be replayed anywhere. Stop *strings* are not here: they are a matter of
    text and live in `pdmux_ray.text`.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0  # below 1e-3 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; k >= 0: the chosen token's logprob and the k best

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-3

    @property
    def host_sampled(self) -> bool:
        """Its tokens need the host: log probabilities are asked for, or which tokens may come depends on those before."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return self.logprobs is not None or self.min_tokens > 0 or penalties != (1.0, 0.0, 0.0)

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if not low <= value <= high:  # also false for NaN
                raise RequestError(f"{name} must be between {low} and {high}, got {value}.", param=name)
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens}).", param="min_tokens"
            )
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise RequestError(f"logprobs must be between 0 and {MAX_LOGPROBS}, got {self.logprobs}.", param="logprobs")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities (natural log, of the untempered, unpenalised distribution) at one position."""

    logprob: float  # of the chosen token
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the control plane must know of a model."""

    context_length: int  # tokens it is made for
    vocab_size: int  # token ids are 0 .. vocab_size - 1
    eos_token_ids: frozenset[int]  # any of them ends an answer
    prefixes_are_shareable: bool = True  # False: KV depends on more than the tokens (dynamic RoPE scaling)


@dataclass(frozen=True, slots=True)
class NewRequest:
    """What the engine is given. `prompt` is never empty. Deadlines are on the engine's monotonic clock."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    sink: str = ""  # which listener its tokens go to (a gateway's id)
    deadline_s: float | None = None
    # Instances to get the prompt's KV from, to be tried in this order until `fetch_deadline_s`, which is set exactly when there
    # are any; after that the prompt is prefilled here.
    prefill_peers: tuple[str, ...] = ()
    fetch_deadline_s: float | None = None
    # Of a request that another instance had before: the tokens that it made, maybe none. It goes on after them, and is not
    # refused because others wait: it has waited once.
    generated: tuple[int, ...] | None = None


@dataclass(slots=True)
class TokenEvent:
    """One request's news from one step. Exactly one event per request carries `finish`; it is the last."""

    request_id: str
    token: int | None = None  # None when the request ended without a new token
    logprobs: TokenLogprobs | None = None
    finish: FinishReason | None = None
    error: str | None = None  # set exactly when finish is ERROR: the message for the client
    cached_tokens: int | None = None  # on the first event: prompt tokens found in the prefix cache
    error_type: str | None = None  # set exactly with `error`: the name of its class in `pdmux_ray.errors`
    # On the event with the first token: seconds since it was taken in that it waited, that its KV came from elsewhere, and that
    # it was computed. They add up to all that there were.
    stage_s: tuple[float, float, float] | None = None


class Load(NamedTuple):
    """Fresh load figures of one instance; they ride along with every step's message."""

    running: int
    waiting: int
    free_pages: int  # free or evictable
    total_pages: int
    steps: int  # steps completed since start
    step_age_s: float  # how long the step under way has taken so far; 0 while there is none
    leased_pages: int = 0  # held by nobody but a transfer that reads them
    quarantined_pages: int = 0  # held by nobody, but a transfer may still write into them
    decoding: int = 0  # of those that run, the ones that decode
    decode_context_tokens: int = 0  # of those, all together
    queued_prefill_tokens: int = 0  # to be prefilled here, of requests that wait or have begun
