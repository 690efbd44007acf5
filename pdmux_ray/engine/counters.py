"""Running totals of one engine since it started. Its instance sends them to the gateways, which export them as metrics."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from kv_transfer.api import LossReason
from pdmux_ray.engine.runner import LaneRunner, Runner
from pdmux_ray.policy.decisions import AdmitReason, BurstReason, FetchReason, ModeReason, StepReason
from pdmux_ray.types import FinishReason, Mode

LANDED = "landed"  # of a fetch; else a LossReason's value


class ExportEnd(Enum):
    """How a prefill for another instance ended here."""

    SENT = "sent"  # the other instance has it all
    UNWANTED = "unwanted"  # it was wanted no more, or could not be sent
    REFUSED = "refused"  # it was not begun: too long for this instance, or the queue is full
    FAILED = "failed"  # the device failed, or its deadline passed


_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0


@dataclass(slots=True)
class Counters:
    """Only the step loop writes, but for `admissions`; any thread may read."""

    steps: int = 0  # completed
    steps_by_reason: dict[StepReason, int] = field(  # launched: completed, given up or failed
        default_factory=lambda: {reason: 0 for reason in StepReason if reason is not StepReason.IDLE}
    )
    modes_by_reason: dict[ModeReason, int] = field(
        default_factory=lambda: dict.fromkeys(ModeReason, 0)
    )  # of steps with a choice
    steps_by_mode: dict[Mode, int] = field(  # launched, on a device with lanes
        default_factory=lambda: {mode: 0 for mode in Mode if mode not in (Mode.AUTO, Mode.PREFILL_FIRST)}
    )
    # Of steps of decodes alone or beside a block, on a device that takes bursts: why so many at once.
    bursts_by_reason: dict[BurstReason, int] = field(default_factory=lambda: dict.fromkeys(BurstReason, 0))
    # Of requests that were judged by when their first token would come. Written by who enqueues, one at a time.
    admissions: dict[AdmitReason, int] = field(default_factory=lambda: dict.fromkeys(AdmitReason, 0))
    preemptions: int = 0
    prefill_tokens: int = 0  # computed by prefill slices, recomputation after preemptions included
    prefix_hit_tokens: int = 0  # not computed because the prefix cache had them
    generated_tokens: int = 0
    wasted_tokens: int = 0  # of requests that had ended earlier in the burst
    page_evictions: int = 0  # cached pages that were forgotten to make room
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))  # without exports
    fetch_choices: dict[FetchReason, int] = field(default_factory=lambda: dict.fromkeys(FetchReason, 0))
    fetches: dict[str, int] = field(  # that have ended
        default_factory=lambda: dict.fromkeys([LANDED, *(reason.value for reason in LossReason)], 0)
    )
    exports: dict[ExportEnd, int] = field(default_factory=lambda: dict.fromkeys(ExportEnd, 0))  # that are no longer read
    kv_received_tokens: int = 0  # landed, complete and verified
    kv_used_tokens: int = 0  # of these, the ones that a first token was made from
    queued_s: float = 0.0  # seconds of steps that left somebody waiting
    # When the latest requests (some batches full) finished while somebody waited, on the clock of `queued_s`.
    queued_finishes_s: deque[float] = field(default_factory=lambda: deque([0.0], maxlen=64))

    def figures(self) -> dict[str, int | dict[str, int]]:
        """For the metrics, as JSON has it: a counter's name -> its total, or its totals by the value of its label."""
        return {
            "pdmux_steps_total": {reason.value: count for reason, count in self.steps_by_reason.items()},
            "pdmux_mode_choices_total": {reason.value: count for reason, count in self.modes_by_reason.items()},
            "pdmux_mode_steps_total": {mode.value: count for mode, count in self.steps_by_mode.items()},
            "pdmux_bursts_total": {reason.value: count for reason, count in self.bursts_by_reason.items()},
            "pdmux_admissions_total": {reason.value: count for reason, count in self.admissions.items()},
            "pdmux_engine_finished_total": {reason.value: count for reason, count in self.finished.items()},
            "pdmux_prefill_tokens_total": self.prefill_tokens,
            "pdmux_prefix_hit_tokens_total": self.prefix_hit_tokens,
            "pdmux_engine_generated_tokens_total": self.generated_tokens,
            "pdmux_wasted_tokens_total": self.wasted_tokens,
            "pdmux_preemptions_total": self.preemptions,
            "pdmux_page_evictions_total": self.page_evictions,
            "pdmux_fetch_choices_total": {reason.value: count for reason, count in self.fetch_choices.items()},
            "pdmux_fetches_total": dict(self.fetches),
            "pdmux_exports_total": {end.value: count for end, count in self.exports.items()},
            "pdmux_kv_received_tokens_total": self.kv_received_tokens,
            "pdmux_kv_used_tokens_total": self.kv_used_tokens,
        }

    def retry_after_s(self, waiting: int) -> float:
        """How long until those who wait now have started, if requests go on finishing as fast as they did lately while others
        waited (how fast they did at quieter times tells nothing of how fast they can); within 1 to 60 s."""
        finishes = tuple(self.queued_finishes_s)  # at once: the step loop may append
        first, last = finishes[0], finishes[-1]
        later = sum(at > first for at in finishes)  # those of one step count together, or not at all
        if not later:
            return _MIN_RETRY_S
        per_s = later / max(last - first, self.queued_s - last)
        return min(max(waiting / per_s, _MIN_RETRY_S), _MAX_RETRY_S)


def unit_figures(runner: Runner) -> dict[str, int | dict[str, int]]:
    """What a device with lanes has to share out, in all and at each split, as it is exported; of another device nothing."""
    if not isinstance(runner, LaneRunner):
        return {}
    splits = {f"{split.prefill_units}/{split.decode_units}": split for split in runner.splits}
    return {
        "pdmux_units": runner.units,
        "pdmux_prefill_units": {name: split.prefill_units for name, split in splits.items()},
        "pdmux_decode_units": {name: split.decode_units for name, split in splits.items()},
    }
