"""Whether a new request is taken in: by when its first token is predicted, after the prompts that are due before it."""

from __future__ import annotations

from dataclasses import dataclass

from pdmux_ray.policy.decisions import Admission, AdmitReason
from pdmux_ray.policy.lane_limits import LaneLimits
from pdmux_ray.policy.lane_step import LaneStep, lane_step
from pdmux_ray.policy.urgency import Pace, may_overtake, rank_of, resting_order
from pdmux_ray.policy.views import CostModel, LanesView, Piece


@dataclass(frozen=True, slots=True)
class TtftObjective:
    """When a first token is due."""

    ttft_s: float
    ttft_s_per_token: float = 0.0

    def of(self, prompt_tokens: int) -> float:
        return self.ttft_s + self.ttft_s_per_token * prompt_tokens


def admit(view: LanesView, new: Piece, limits: LaneLimits, costs: CostModel, objective: TtftObjective) -> Admission:
    """`new`: the prompt's tokens, and how many of them the prefix cache has.

    Predicted are the prefills that have begun (but for those that it may overtake), the waiting ones that are due before it and
    its own. What nobody can predict is left out: how long the decodes hold pages and places that it needs.

    Refused when that is later than its objective; `retry_after_s` is by how much, which is when the same request would be in
    time if nobody else came.
    """
    step = lane_step(view, limits, costs)
    assert step.pace is not None
    predicted_s = _predict(step, new, step.pace, objective)
    allowed_s = objective.of(new.new_tokens + new.prior_tokens)
    late_s = predicted_s - allowed_s
    if late_s <= 0:
        return Admission(True, predicted_s, 0.0, AdmitReason.IN_TIME)
    if costs.prefill((new,), view.layers, view.units, 0, last=True).predicted_s > allowed_s:
        return Admission(True, predicted_s, 0.0, AdmitReason.LONG)
    return Admission(False, predicted_s, late_s, AdmitReason.LATE)


def _predict(step: LaneStep, new: Piece, pace: Pace, objective: TtftObjective) -> float:
    """Seconds from now to the first token."""
    view, limits = step.view, step.limits
    due_s = view.now + objective.of(new.new_tokens + new.prior_tokens)
    ahead = [
        Piece(request.known_tokens - request.computed_tokens, request.computed_tokens)
        for request in step.startable
        if rank_of(request.ttft_deadline_s, request.ttft_deadline_s < view.now, limits.patience_s) <= due_s
    ]
    ahead_s = pace(ahead, view.layers) if ahead else 0.0
    own_s = pace((new,), view.layers)
    begun = resting_order(view, step.jobs, limits.patience_s, pace)
    if may_overtake(view.now + ahead_s, own_s, due_s, begun, limits.overtakes):
        return ahead_s + own_s
    return ahead_s + own_s + sum(rest_s for _, rest_s in begun)
