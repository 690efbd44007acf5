"""How a step may share the device between decodes and a prefill, and what each way is predicted to do.

Which of them AUTO takes is `mode_choice.choose_way`. When it matters how soon the prefill ends: how fast does it get on while
decode steps still end within the ITL objective t? With D(u) for the decode step on u of U units, C(u) for the prefill's speed
there, and 1 - D(U) / t for the part of the time that decodes leave over:

    SPLIT, CAPPED              C(p) / C(U) of full speed, with p what decode does not need to end within t
    TIME_SHARED and CHUNKED    1 - D(U) / t of full speed (CHUNKED: times what riding along saves or small chunks cost)

So partitioning pays where few units decode nearly as fast as all of them (a GPU, whose memory a few units saturate) and where t
is close to D(U). On two cores with t = 3 D(U) time-sharing would leave 2/3 of the machine to a prefill, and a split 1/2; but t
is kept by bounds, which are wider for steps on every core, and long prompts got on faster beside the decodes. What was measured
is in docs/performance.md, "Where multiplexing does not pay".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from pdmux_ray.policy.decisions import Block, Chunk
from pdmux_ray.policy.views import CostModel, Estimate, JobView, LanesView, Piece
from pdmux_ray.types import Mode, Split

SLIP = 1.05  # a block that ends just after a decode step leaves its lane idle for a whole one: plan it this much shorter
WELL_FILLED = 0.9  # of the decode steps that a block lasts for
CHUNK_STEP_TOKENS = 8  # tokens by which the length of a chunk is chosen
WAIT = 0.25  # of a decode step: a block that is due within it is waited for
MOST_STEPS = 4  # that a block lasts for, when a layer is not longer: until it ends, no split changes and nobody overtakes


class Decodes(NamedTuple):
    """The decodes of a step."""

    batch: int
    context_tokens: int


class Work(NamedTuple):
    """What the prefill lane does: a job, begun or new."""

    job: JobView | None  # None: a new one
    chunks: tuple[Chunk, ...]  # of a new one
    pieces: Sequence[Piece]
    layers_done: int
    due_s: float  # the earliest TTFT deadline in it; inf: there is none

    @property
    def new_tokens(self) -> int:
        return sum([piece.new_tokens for piece in self.pieces])

    def block(self, layers: int) -> Block:
        return Block(None if self.job is None else self.job.job_id, self.chunks, self.layers_done + layers)


class Way(NamedTuple):
    """One way to run a step with decodes and a prefill."""

    mode: Mode
    split: Split
    layers: int  # of the block; CHUNKED: all
    gap_s: Estimate  # between two tokens of a decode
    finish_s: float  # until the prefill is done, if every step is like this one
    decode_s: Estimate | None  # CHUNKED: None
    block_s: Estimate | None  # CHUNKED: None


class Blocks(dict[int, Estimate]):
    """What a block of so many of the layers that are left takes, on `units` beside decodes on `decode_units` (0: none). The
    costs are asked for each number once: who looks for the best one comes back to some."""

    def __init__(self, costs: CostModel, work: Work, layers: int, units: int, decode_units: int) -> None:
        """`layers`: of the model."""
        self.left = layers - work.layers_done
        self._costs = costs
        self._pieces = work.pieces
        self._units = units
        self._decode_units = decode_units

    def __missing__(self, layers: int) -> Estimate:
        found = self._costs.prefill(self._pieces, layers, self._units, self._decode_units, last=layers == self.left)
        self[layers] = found
        return found

    @property
    def whole(self) -> Estimate:
        """Of all of them."""
        return self[self.left]


def fewest_units(costs: CostModel, decodes: Decodes, splits: Iterable[Split], itl_s: float) -> tuple[Split, Estimate]:
    """The first of `splits` whose decode step, with a prefill beside it, has a bound that meets the objective, and that step;
    when none has, the one that misses it least. Raises ValueError without any split."""
    least: tuple[Split, Estimate] | None = None
    for split in splits:
        step_s = costs.decode(*decodes, split.decode_units, split.prefill_units)
        if step_s.bound_s <= itl_s:
            return split, step_s
        if least is None or step_s.bound_s < least[1].bound_s:
            least = split, step_s
    if least is None:
        raise ValueError("a device with a single unit cannot be split: only time_shared and the modes in one pass do without")
    return least


def capped_splits(view: LanesView) -> Iterator[Split]:
    """Most units for the prefill first; the decodes use all."""
    return (Split(split.prefill_units, view.units) for split in view.splits)


def largest_that_fits(fits: Callable[[int], bool], high: int, guess: float | None = None) -> int:
    """The largest number of 1 .. `high` that fits, if smaller ones fit, too; 1 when none does. A good `guess` saves questions.

    Where a smaller one does not fit (`latency.correction` may say so for a while), it is one that fits, but perhaps not the
    largest: a block or chunk is shorter than it might be, and keeps its bound.
    """
    low = 1
    middle = (high + 2) // 2 if guess is None else min(max(math.floor(min(guess, high)), 2), high)
    near = guess is not None  # what comes next to a guess is asked after it
    while low < high:
        if fits(middle):
            low = middle
            middle = low + 1 if near else (low + high + 1) // 2
        else:
            high = middle - 1
            middle = max(high, 2) if near else (low + high + 1) // 2
        near = False
    return low


def fill(blocks: Blocks, step_s: float, late_s: float) -> tuple[int, float]:
    """How many layers to launch beside decode steps of `step_s`, and for how many steps that keeps the lane.

    As many as fill one step, by predicted time. Where layers are so long that this would leave much of the step empty, as many
    as fill two, or up to `MOST_STEPS`, because the next block is launched at the end of a step. The last layers are not left
    for another step when they end at most `late_s` after this one: so long its successor waits.
    """
    left, whole_s = blocks.left, blocks.whole.predicted_s
    if step_s < whole_s * SLIP <= step_s + late_s:
        return left, whole_s * SLIP / step_s
    best, best_steps, best_filled = 1, 0.0, 0.0
    for steps in range(1, MOST_STEPS + 1):
        room_s = steps * step_s / SLIP
        guess = left * room_s / whole_s
        layers = largest_that_fits(lambda layers: blocks[layers].predicted_s <= room_s, left, guess)  # noqa: B023 - called at once
        took_s = blocks[layers].predicted_s
        if took_s > room_s:
            continue
        if layers == left or took_s >= WELL_FILLED * room_s:
            return layers, float(steps)
        if took_s / steps > best_filled:
            best, best_steps, best_filled = layers, float(steps), took_s / steps
    if not best_steps:
        best_steps = float(-(-blocks[1].predicted_s * SLIP // step_s))
    return best, best_steps


def beside(costs: CostModel, view: LanesView, decodes: Decodes, work: Work, mode: Mode, itl_s: float) -> Way:
    """SPLIT or CAPPED: decodes and block at once, with as many layers as fill the decode step."""
    splits = view.splits if mode is Mode.SPLIT else capped_splits(view)
    split, step_s = fewest_units(costs, decodes, splits, itl_s)
    blocks = Blocks(costs, work, view.layers, split.prefill_units, split.decode_units)
    layers, steps = fill(blocks, step_s.predicted_s, wait_s(step_s, itl_s))
    finish_s = steps * step_s.predicted_s * blocks.left / layers
    return Way(mode, split, layers, step_s, finish_s, step_s, blocks[layers])


def wait_s(decode_s: Estimate, itl_s: float) -> float:
    """How long the decodes after a step wait for a block that is about to end. Else its units would be idle for most of a
    decode step, which would have fewer units than it could; and its prompts' tokens would come a step later. Never so long that
    the next gap would miss the objective by its bound."""
    return max(0.0, min(WAIT * decode_s.predicted_s, itl_s - decode_s.bound_s))


def time_shared(units: int, step_s: Estimate, blocks: Blocks, itl_s: float) -> Way:
    """A decode step, then as many layers as still fit the objective (at least one; inf: all), each on every unit."""
    left, whole_s = blocks.left, blocks.whole
    layers = left
    if itl_s < math.inf:
        guess = left * (itl_s - step_s.bound_s) / whole_s.bound_s
        layers = largest_that_fits(lambda layers: step_s.bound_s + blocks[layers].bound_s <= itl_s, left, guess)
    block_s = blocks[layers]
    gap_s = Estimate(step_s.predicted_s + block_s.predicted_s, step_s.bound_s + block_s.bound_s)
    finish_s = -(-left // layers) * step_s.predicted_s + whole_s.predicted_s
    return Way(Mode.TIME_SHARED, Split(units, units), layers, gap_s, finish_s, step_s, block_s)


def chunked(costs: CostModel, view: LanesView, decodes: Decodes, work: Work, itl_s: float, most_tokens: int) -> Way:
    """The decodes and a chunk of the prefill in one pass. The chunk of a step half-way through it stands for all."""
    rest, prior = work.new_tokens, work.pieces[0].prior_tokens
    tokens, gap_s = chunk_tokens(costs, view, decodes, min(rest, most_tokens), prior + rest // 2, itl_s)
    finish_s = gap_s.predicted_s * max(1.0, rest / tokens)
    return Way(Mode.CHUNKED, Split(view.units, view.units), view.layers, gap_s, finish_s, None, None)


def chunk_tokens(
    costs: CostModel, view: LanesView, decodes: Decodes, most_tokens: int, prior_tokens: int, itl_s: float
) -> tuple[int, Estimate]:
    """The longest chunk (of `CHUNK_STEP_TOKENS` tokens at least) whose step keeps the objective, and that step."""

    def step(grains: int) -> Estimate:
        return costs.mixed(*decodes, (Piece(min(grains * CHUNK_STEP_TOKENS, most_tokens), prior_tokens),), view.units)

    every = -(-most_tokens // CHUNK_STEP_TOKENS)
    grains = every if itl_s == math.inf else largest_that_fits(lambda grains: step(grains).bound_s <= itl_s, every)
    return min(grains * CHUNK_STEP_TOKENS, most_tokens), step(grains)
