"""Whatever shares the device with a request, and however its units are split, it gets the tokens of prefill_first."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from tiny_models import VOCAB, save_tiny

from pdmux_ray.config import EngineConfig
from pdmux_ray.device.base import limit_spinning
from pdmux_ray.device.cpu.cores import usable_cores
from pdmux_ray.engine.engine import Engine
from pdmux_ray.engine.fake_runner import linear_costs
from pdmux_ray.engine.limits import resolve_limits
from pdmux_ray.types import FinishReason, Mode, ModelFacts, NewRequest, SamplingParams
from tests.unit.engine.random_planner import MODES, RandomPlanner
from tests.unit.engine.world import Log

limit_spinning()
from pdmux_ray.device.cpu.runner import CpuRunner  # noqa: E402

Schedule = dict[int, list[NewRequest | str]]  # step -> who comes, and the ids of those who are aborted

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(usable_cores() < 2, reason="two lanes need two cores"),
]

SCHEDULES = 500
PAGE = 4
PAGES = 48
FACTS = ModelFacts(60, VOCAB, frozenset({2}))
COSTS = linear_costs(step_s=0.001, prefill_s_per_token=0.0001, layers=3, units=2)  # about as fast as the tiny model is


class KeptRunner(CpuRunner):
    """Outlives its engines, so that a schedule costs no loading; what the schedule before left in the pages stays there."""

    def close(self) -> None:
        """The fixture closes it."""


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeptRunner]:
    config = {"device": "cpu", "mode": "auto", "page_size": PAGE, "kv_cache_gib": 0.001, "threads": 2}
    runner = KeptRunner(save_tiny("llama", tmp_path_factory.mktemp("llama")), EngineConfig.model_validate(config))
    assert runner.pages >= PAGES
    yield runner
    CpuRunner.close(runner)


def run(device: KeptRunner, mode: Mode, pages: int, schedule: Schedule, **more: Any) -> Log:
    """Plays a schedule to its end and checks that it leaves nothing behind."""
    multiplex = {"itl_s": 0.002, "ttft_s": 0.01}
    config = {
        "device": "cpu",
        "mode": mode,
        "multiplex": multiplex,
        "max_prefill_tokens": 64,
        "chunk_tokens": 9,
        "max_batch": 6,
    }
    log = Log()
    device.pages = pages
    engine = Engine(device, resolve_limits(EngineConfig.model_validate(config), FACTS, device), log, **more)
    for step in range(max(schedule) + 1):
        for new in schedule.get(step, ()):
            if isinstance(new, str):
                engine.abort([new])
            else:
                engine.submit(new)
        engine.step()
    while engine.step():
        pass
    engine.check_integrity()
    log.assert_each_ended_at_most_once()
    load = engine.load()
    assert (load.running, load.waiting, load.free_pages, device._jobs) == (0, 0, pages, {})
    engine.close()
    return log


def draw_requests(rng: random.Random, count: int) -> list[NewRequest]:
    """Many share a beginning; greedy and drawn tokens; short and long answers."""
    stems = [[rng.randrange(3, VOCAB) for _ in range(30)] for _ in range(3)]
    requests = []
    for index in range(count):
        stem, tail = rng.choice(stems), rng.randrange(0, 8)
        prompt = stem[: rng.randrange(1, len(stem))] + [rng.randrange(3, VOCAB) for _ in range(tail)]
        params = SamplingParams(
            max_tokens=rng.randrange(1, 9),
            temperature=rng.choice([0.0, 1.2]),
            seed=rng.randrange(3),
            ignore_eos=rng.random() < 0.5,
            repetition_penalty=rng.choice([1.0, 1.3]),
        )
        requests.append(NewRequest(f"r{index}", tuple(prompt), params))
    return requests


def draw_schedule(rng: random.Random, requests: Sequence[NewRequest]) -> Schedule:
    schedule: Schedule = {}
    for new in rng.sample(requests, rng.randrange(2, 6)):
        step = rng.randrange(12)
        schedule.setdefault(step, []).append(new)
        if rng.random() < 0.2:
            schedule.setdefault(step + rng.randrange(1, 12), []).append(new.request_id)
    return schedule


@pytest.fixture(scope="module")
def alone(device: KeptRunner) -> dict[str, tuple[NewRequest, list[int], FinishReason | None]]:
    """Requests, each with the tokens and the end that prefill_first gives it."""
    requests = draw_requests(random.Random(0), 60)
    log = run(device, Mode.PREFILL_FIRST, 400, {0: list(requests)})
    return {new.request_id: (new, log.tokens(new.request_id), log.finish(new.request_id)) for new in requests}


PLANNED = {
    "random": (Mode.AUTO, MODES),
    "random splits": (Mode.SPLIT, [Mode.SPLIT]),
    "random capped": (Mode.CAPPED, [Mode.CAPPED]),
    "random time_shared": (Mode.TIME_SHARED, [Mode.TIME_SHARED]),
    "auto": (Mode.AUTO, None),
    "split": (Mode.SPLIT, None),
    "chunked": (Mode.CHUNKED, None),
}


@pytest.mark.parametrize("kind", PLANNED)
def test_random_schedules_give_the_tokens_of_prefill_first(
    device: KeptRunner, alone: dict[str, tuple[NewRequest, list[int], FinishReason | None]], kind: str
) -> None:
    mode, drawn = PLANNED[kind]
    requests = [new for new, _, _ in alone.values()]
    for seed in range(SCHEDULES):
        rng = random.Random(seed)
        planner = RandomPlanner(seed, 6, drawn) if drawn else None
        log = run(device, mode, rng.randrange(16, PAGES), draw_schedule(rng, requests), costs=COSTS, planner=planner)
        for name in log.events:
            _, tokens, finish = alone[name]
            got = log.tokens(name)
            if log.finish(name) is FinishReason.ABORT:
                assert got == tokens[: len(got)], f"{name}, schedule {seed}"
            else:
                assert (got, log.finish(name)) == (tokens, finish), f"{name}, schedule {seed}"
