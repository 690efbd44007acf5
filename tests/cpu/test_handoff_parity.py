"""One instance prefills, another one decodes: the tokens are those of one instance that does both."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_models import VOCAB, save_tiny

from kv_transfer.endpoint import Endpoint
from kv_transfer.local import LocalNetwork
from kv_transfer.weather import Weather
from pdmux_ray.config import EngineConfig
from pdmux_ray.device.base import limit_spinning
from pdmux_ray.device.cpu.cores import usable_cores
from pdmux_ray.engine.engine import Engine
from pdmux_ray.engine.limits import resolve_limits
from pdmux_ray.policy.decisions import FetchReason
from pdmux_ray.types import FinishReason, Mode, ModelFacts, NewRequest, SamplingParams
from tests.unit.engine.world import Log

limit_spinning()
from pdmux_ray.device.cpu.runner import CpuRunner  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.skipif(usable_cores() < 2, reason="two lanes need two cores")]

PAGE = 4
FACTS = ModelFacts(60, VOCAB, frozenset({2}))
LONG = ModelFacts(8000, VOCAB, frozenset({2}))  # of a runner that holds so much
NUMBERS = itertools.count()  # a runner keeps penalties by request id
Answer = tuple[list[int], FinishReason | None]
Open = Callable[[Mode, int], CpuRunner]


class KeptRunner(CpuRunner):
    """Outlives its engines, so that a case costs no loading; what the case before left in the pages stays there."""

    def close(self) -> None:
        """The fixture closes it."""


def settings(mode: Mode, page_size: int, **more: object) -> EngineConfig:
    multiplex = {"policy": "fixed", "block_layers": 1} if mode is Mode.SPLIT else {}
    config = {
        "device": "cpu",
        "mode": mode,
        "page_size": page_size,
        "kv_cache_gib": 0.001,
        "threads": 2,
        "multiplex": multiplex,
    }
    config |= {"max_prefill_tokens": 64, "chunk_tokens": 9, "max_batch": 6, **more}
    return EngineConfig.model_validate(config)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def open_runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    model_dir: Path = save_tiny("llama", tmp_path_factory.mktemp("llama"))
    made: dict[tuple[int, int], KeptRunner] = {}

    def get(number: int, page_size: int) -> CpuRunner:
        if (number, page_size) not in made:
            config = settings(Mode.SPLIT, page_size, dtype=request.param)
            made[number, page_size] = KeptRunner(model_dir, config)
        return made[number, page_size]

    yield get
    for runner in made.values():
        CpuRunner.close(runner)


def engine(runner: CpuRunner, mode: Mode, log: Log, endpoint: Endpoint | None = None) -> Engine:
    room = runner.pages * runner.page_size
    long = room > LONG.context_length
    more = {"max_prefill_tokens": LONG.context_length, "chunk_tokens": 500} if long else {}
    limits = resolve_limits(settings(mode, runner.page_size, **more), LONG if long else FACTS, runner)
    return Engine(runner, limits, log, port=endpoint)


def draw_requests(rng: random.Random, count: int) -> list[NewRequest]:
    """Many share a beginning; greedy and drawn tokens, penalties; prompts from one token on."""
    stems = [[rng.randrange(3, VOCAB) for _ in range(50)] for _ in range(4)]
    requests = []
    for _ in range(count):
        prompt = rng.choice(stems)[: rng.randrange(1, 50)] + [rng.randrange(3, VOCAB) for _ in range(rng.randrange(8))]
        params = SamplingParams(
            max_tokens=rng.randrange(1, 9),
            temperature=rng.choice([0.0, 1.2]),
            seed=rng.randrange(3),
            ignore_eos=rng.random() < 0.5,
            repetition_penalty=rng.choice([1.0, 1.3]),
        )
        requests.append(NewRequest(f"r{next(NUMBERS)}", tuple(prompt), params))
    return requests


def answers(log: Log, requests: Sequence[NewRequest]) -> dict[str, Answer]:
    return {new.request_id: (log.tokens(new.request_id), log.finish(new.request_id)) for new in requests}


def alone(runner: CpuRunner, requests: Sequence[NewRequest]) -> dict[str, Answer]:
    """Each on an engine of its own: neither prefix hits nor others beside it."""
    log = Log()
    for new in requests:
        one = engine(runner, Mode.PREFILL_FIRST, log)
        one.submit(new)
        while one.step():
            pass
        one.close()
    return answers(log, requests)


class Two:
    """An engine that prefills and one that decodes, each with its end of a local transport; all stepped in turn."""

    def __init__(self, decode: CpuRunner, prefill: CpuRunner, modes: tuple[Mode, Mode], weather: Weather | None = None) -> None:
        network = LocalNetwork(time.monotonic, weather)
        self.log = Log()
        names = {"d": decode, "p": prefill}
        self.ends = {n: Endpoint(network.add(n, r.layout, r.kv_memory), checksum=True) for n, r in names.items()}
        self.engines = [
            engine(runner, mode, self.log, self.ends[n]) for (n, runner), mode in zip(names.items(), modes, strict=True)
        ]
        self.ends["d"].connect("p", "")
        while len(self.ends["d"].peers()) + len(self.ends["p"].peers()) < 2:
            self.turn()

    def turn(self) -> bool:
        for end in self.ends.values():
            end.step()
        return any([engine.step() for engine in self.engines])

    def run(self, requests: Sequence[NewRequest], rng: random.Random, peers: Sequence[str] = ("p",)) -> dict[str, Answer]:
        """They come a few at a time; everything has ended when it returns, and nothing is left behind."""
        waiting = list(requests)
        while waiting or any(engine.load().running + engine.load().waiting for engine in self.engines):
            if waiting and rng.random() < 0.3:
                due_s = time.monotonic() + 30
                self.engines[0].submit(replace(waiting.pop(0), prefill_peers=tuple(peers), fetch_deadline_s=due_s))
            self.turn()
        while self.turn() or not all(end.idle for end in self.ends.values()):
            pass
        for each in self.engines:
            each.check_integrity()
            load = each.load()
            assert (load.leased_pages, load.quarantined_pages, load.free_pages) == (0, 0, load.total_pages)
        return answers(self.log, requests)

    def close(self) -> None:
        for end in self.ends.values():
            end.close()
        for each in self.engines:
            each.close()


MODES = [
    (Mode.PREFILL_FIRST, Mode.PREFILL_FIRST),
    (Mode.CHUNKED, Mode.CHUNKED),
    (Mode.SPLIT, Mode.SPLIT),
    (Mode.PREFILL_FIRST, Mode.SPLIT),
]


@pytest.mark.parametrize("modes", MODES, ids=lambda modes: "-".join(mode.value for mode in modes))
@pytest.mark.parametrize("pages", [(PAGE, PAGE), (PAGE, 2 * PAGE), (2 * PAGE, PAGE)], ids=str)
def test_a_prompt_prefilled_elsewhere_gives_the_same_tokens(
    open_runner: Open, modes: tuple[Mode, Mode], pages: tuple[int, int]
) -> None:
    rng = random.Random(f"{modes} {pages}")
    requests = draw_requests(rng, 60)
    decode, prefill = open_runner(0, pages[0]), open_runner(1, pages[1])
    want = alone(decode, requests)
    decode.kv_memory[:] = 0xFF  # NaN: whatever is read without having been written shows
    prefill.kv_memory[:] = 0xFF
    two = Two(decode, prefill, modes)
    assert two.run(requests, rng) == want
    here, there = (each.counters for each in two.engines)
    assert here.kv_received_tokens == here.kv_used_tokens > 200
    assert here.fetches["landed"] == sum(here.fetches.values()) == here.fetch_choices[FetchReason.ROOM] > 20
    # Of prompts shorter than a page, and what the cache lacked of those it had the rest of.
    assert here.prefill_tokens < sum(pages[0] for _ in requests)
    assert here.prefix_hit_tokens > 0
    assert there.prefix_hit_tokens > 0
    assert there.generated_tokens == 0
    two.close()


@pytest.mark.parametrize(
    "modes", [(Mode.CHUNKED, Mode.SPLIT), (Mode.SPLIT, Mode.CHUNKED)], ids=["chunked-split", "split-chunked"]
)
def test_prompts_of_thousands_of_tokens_give_the_same_tokens_with_and_without_a_prefix_that_is_there(
    tmp_path: Path, modes: tuple[Mode, Mode]
) -> None:
    """Row 45."""
    rng = random.Random(45)
    first = [rng.randrange(3, VOCAB) for _ in range(6000)]
    prompts = [first, first[:4000] + [rng.randrange(3, VOCAB) for _ in range(3000)]]
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    requests = [NewRequest(f"r{next(NUMBERS)}", tuple(prompt), params) for prompt in prompts]
    config = settings(Mode.SPLIT, 16, dtype="bfloat16", kv_cache_gib=0.02)
    decode, prefill = (KeptRunner(save_tiny("llama", tmp_path), config) for _ in range(2))
    want = alone(decode, requests)
    decode.kv_memory[:] = prefill.kv_memory[:] = 0xFF
    two = Two(decode, prefill, modes)
    assert {**two.run(requests[:1], rng), **two.run(requests[1:], rng)} == want
    counters = two.engines[0].counters
    assert counters.kv_received_tokens == counters.kv_used_tokens == 5999 + 2999
    assert counters.prefill_tokens == 0
    two.close()
    for runner in (decode, prefill):
        CpuRunner.close(runner)


@pytest.mark.parametrize("fault", ["fail", "tear"])
def test_transfers_that_fail_are_made_up_for_here_with_the_same_tokens(open_runner: Open, fault: str) -> None:
    rng = random.Random(fault)
    requests = draw_requests(rng, 50)
    decode, prefill = open_runner(0, PAGE), open_runner(1, PAGE)
    want = alone(decode, requests)
    two = Two(decode, prefill, (Mode.SPLIT, Mode.SPLIT), Weather(**{fault: True}))
    assert two.run(requests, rng) == want
    counters = two.engines[0].counters
    assert (counters.kv_used_tokens, counters.fetches["landed"]) == (0, 0)
    assert sum(counters.fetches.values()) > 20
    two.close()


def test_with_threads_of_their_own_engines_and_transfers_give_the_same_tokens_and_leave_nothing(open_runner: Open) -> None:
    requests = draw_requests(random.Random(5), 40)
    decode, prefill = open_runner(0, PAGE), open_runner(1, PAGE)
    want = alone(decode, requests)
    two = Two(decode, prefill, (Mode.SPLIT, Mode.SPLIT))
    for each in (*two.ends.values(), *two.engines):
        each.start()
    for new in requests:
        two.engines[0].submit(replace(new, prefill_peers=("p",), fetch_deadline_s=time.monotonic() + 30))
    two.log.wait_for_ends([new.request_id for new in requests])
    assert answers(two.log, requests) == want
    counters = two.engines[0].counters
    assert counters.kv_received_tokens == counters.kv_used_tokens > 0
    while not all(end.idle for end in two.ends.values()) or any(each.load().leased_pages for each in two.engines):
        time.sleep(0.001)
    two.close()
    for each in two.engines:
        each.check_integrity()
        assert each.load().free_pages == each.load().total_pages
