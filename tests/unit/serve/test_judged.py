"""What a gateway says of a request in its metrics: its SLO's verdict, and where its first token's time went."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from pdmux_ray.errors import DeadlineError, InstanceUnavailableError, QueueFullError, RequestError
from pdmux_ray.metrics.gateway_metrics import GatewayMetrics
from pdmux_ray.metrics.goodput import Slo
from pdmux_ray.metrics.tiers import Tier
from pdmux_ray.serve.answer import Answer
from pdmux_ray.serve.generation import Choice
from pdmux_ray.serve.mailbox import Mailbox
from tests.unit.serve.fakes import LetterText

NEVER = Slo(ttft_s=1e-9)
LENIENT = Slo(60.0, 60.0)


class Requests:
    """Engine requests that an instance takes at once, and that were sent a quarter of a second ago."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.mailbox = Mailbox(self.leave_all)
        self.take, self.fail, self.lost = self.mailbox.take, self.mailbox.fail, self.mailbox.fail
        self.sent_s = time.monotonic() - 0.25
        self._refusal = refusal

    async def start(self, deadline_s: float) -> None:
        if self._refusal is not None:
            raise self._refusal

    def ended(self, index: int) -> None: ...

    def leave(self, index: int) -> None: ...

    def leave_all(self) -> None: ...


async def judged(slo: Slo, events: Sequence[tuple[int, Any]], refusal: Exception | None = None, choices: int = 1) -> Any:
    """The metrics of an answer, half a second old, that these events came for. It is closed with what there was."""
    metrics = GatewayMetrics("g", dict, dict, {"tier": slo})
    requests = Requests(refusal)
    answer = Answer(
        "chat",
        [Choice(index, LetterText(), 3, first_of_prompt=index == 0) for index in range(choices)],
        requests,
        arrived_s=requests.sent_s - 0.25,
        timeout_s=60.0,
        metrics=metrics,
        tier=Tier("tier", slo),
    )
    for index, event in events:
        requests.mailbox.put(index, event)
    try:
        await answer.start()
        if events:
            await answer.next()
    except Exception:
        assert refusal is not None or events
    finally:
        answer.close()
    return metrics.registry


def verdicts(registry: Any) -> dict[str, float]:
    samples = [sample for family in registry.collect() for sample in family.samples]
    found = [sample for sample in samples if sample.name == "pdmux_slo_requests_total" and sample.value]
    return {sample.labels["verdict"]: sample.value for sample in found}


def first(index: int = 0, finish: str | None = None) -> tuple[int, Any]:
    return index, (f"r{index}", 97, None, finish, None, 0, (0.0625, 0.0, 0.125))


def last(index: int = 0) -> tuple[int, Any]:
    return index, (f"r{index}", 98, None, "length", None, None)


async def test_a_request_within_its_objectives_is_good() -> None:
    assert verdicts(await judged(LENIENT, [first(), last()])) == {"good": 1}


async def test_a_late_first_token_is_a_miss_of_that_objective() -> None:
    assert verdicts(await judged(NEVER, [first(finish="length")])) == {"ttft": 1}


async def test_of_several_choices_the_worst_counts_and_the_request_once() -> None:
    token_less = (1, ("r1", None, None, "stop", None, 0))
    assert verdicts(await judged(LENIENT, [first(finish="length"), token_less], choices=2)) == {"truncated": 1}


@pytest.mark.parametrize(
    ("refusal", "found"),
    [
        (QueueFullError(9, 1.0), {"error": 1}),
        (InstanceUnavailableError("gone"), {"error": 1}),
        (DeadlineError("late"), {"error": 1}),
        (ValueError("ours"), {"error": 1}),
        (RequestError("asked for what cannot be"), {}),
    ],
)
async def test_what_the_server_could_not_do_is_a_miss_and_what_nobody_can_is_none(
    refusal: Exception, found: dict[str, float]
) -> None:
    assert verdicts(await judged(LENIENT, [], refusal)) == found


async def test_a_client_that_leaves_is_not_counted() -> None:
    assert verdicts(await judged(LENIENT, [first()])) == {}


async def test_a_cancelled_request_is_not_counted() -> None:
    metrics = GatewayMetrics("g", dict, dict)
    requests = Requests()
    answer = Answer("chat", [Choice(0, LetterText(), 3)], requests, arrived_s=time.monotonic(), timeout_s=60.0, metrics=metrics)
    waiting = asyncio.ensure_future(answer.next())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    answer.close()
    assert verdicts(metrics.registry) == {}


async def test_the_stages_of_every_first_token_add_up_to_the_sum_of_ttft() -> None:
    registry = await judged(LENIENT, [first(0), first(1), last(0), last(1)], choices=2)
    ttft_s = registry.get_sample_value("pdmux_time_to_first_token_seconds_sum")
    stages = {
        stage: registry.get_sample_value("pdmux_first_token_stage_seconds_sum", {"stage": stage})
        for stage in ("gateway", "queue", "transfer", "prefill", "delivery")
    }
    assert sum(stages.values()) == pytest.approx(ttft_s)
    assert stages["gateway"] == pytest.approx(0.5)
    assert (stages["queue"], stages["transfer"], stages["prefill"]) == (0.125, 0.0, 0.25)
    assert registry.get_sample_value("pdmux_first_token_stage_seconds_count", {"stage": "queue"}) == 2


async def test_only_a_complete_choice_of_two_tokens_has_a_time_per_token() -> None:
    for events, count in (([first(), last()], 1.0), ([first(finish="length")], 0.0), ([first()], 0.0)):
        registry = await judged(LENIENT, events)
        assert registry.get_sample_value("pdmux_time_per_output_token_seconds_count") == count
