"""Two engines of the fake device with their ends of KV transfers, over NIXL, in one process."""

from __future__ import annotations

import importlib.util
import random
import time
from collections.abc import Callable, Iterator

import pytest

from kv_transfer.api import LossReason
from pdmux_ray.clock import WallClock
from pdmux_ray.config import EngineConfig, TransferConfig
from pdmux_ray.engine.engine import Engine
from pdmux_ray.engine.fake_runner import FakeRunner, fake_token
from pdmux_ray.engine.limits import resolve_limits
from pdmux_ray.serve.peers import Peers, Who, open_peers
from pdmux_ray.types import ModelFacts, NewRequest, SamplingParams
from tests.unit.engine.world import Log

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed (extra nixl)"),
]

FACTS = ModelFacts(4096, 32_000, frozenset({2}))
CONFIG = EngineConfig(device="fake")


class Instance:
    """As `serve.instance` puts one together."""

    def __init__(
        self,
        name: str,
        log: Log,
        *,
        model: str = "m",
        secret: str = "s",
        page_size: int = 16,
        transfer: TransferConfig | None = None,
    ) -> None:
        self.name = name
        self.runner = FakeRunner(512, page_size, 0.0, 0.0, WallClock())
        who = Who(name, "127.0.0.1", model, secret)
        self.peers: Peers = open_peers(who, self.runner, FACTS, transfer or TransferConfig())
        self.engine = Engine(self.runner, resolve_limits(CONFIG, FACTS, self.runner), log, port=self.peers.port)
        self.engine.start()
        self._closed = False

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.peers.close(0.0)
        self.engine.close()


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def opened(log: Log) -> Iterator[Callable[..., Instance]]:
    instances: list[Instance] = []

    def open_one(name: str, **options: str | int | TransferConfig) -> Instance:
        instances.append(Instance(name, log, **options))  # type: ignore[arg-type]
        return instances[-1]

    yield open_one
    for instance in instances:
        instance.close()


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not happened"
        time.sleep(0.005)


def ask(instance: Instance, request_id: str, prompt: list[int], *peers: str) -> None:
    due = time.monotonic() + 20 if peers else None
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    instance.engine.submit(NewRequest(request_id, tuple(prompt), params, prefill_peers=peers, fetch_deadline_s=due))


def expected(prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(5):
        tokens.append(fake_token(0, tokens, 32_000))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("pages", [(16, 16), (16, 8)], ids=str)
def test_a_prompt_that_a_peer_prefills_gives_the_tokens_that_it_would_give_here(
    opened: Callable[..., Instance], log: Log, pages: tuple[int, int]
) -> None:
    decode, prefill = opened("d", page_size=pages[0]), opened("p", page_size=pages[1])
    decode.peers.meet({"p": prefill.peers.address})
    wait_until(lambda: decode.peers.linked() == ["p"] and prefill.peers.linked() == ["d"])
    rng = random.Random(0)
    prompts = {f"r{n}": [rng.randrange(3, 32_000) for _ in range(rng.choice([1, 2, 17, 300]))] for n in range(12)}
    for request_id, prompt in prompts.items():
        ask(decode, request_id, prompt, "p")
    log.wait_for_ends(list(prompts))
    for request_id, prompt in prompts.items():
        assert log.tokens(request_id) == expected(prompt), request_id
    here, there = decode.engine.counters, prefill.engine.counters
    assert here.kv_received_tokens == here.kv_used_tokens > 500
    assert there.generated_tokens == 0
    wait_until(lambda: not (decode.engine.load().leased_pages or prefill.engine.load().leased_pages))
    figures = prefill.peers.figures()
    assert figures["pdmux_kv_written_bytes_total"] == decode.peers.figures()["pdmux_kv_landed_bytes_total"] != 0


@pytest.mark.parametrize(("transfer", "checked"), [(TransferConfig(), True), (TransferConfig(checksum=False), False)])
def test_what_lands_in_host_memory_is_checked_unless_that_is_switched_off(
    opened: Callable[..., Instance], log: Log, transfer: TransferConfig, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 24."""
    decode, prefill = opened("d", transfer=transfer), opened("p")
    decode.peers.meet({"p": prefill.peers.address})
    wait_until(lambda: decode.peers.linked() == ["p"])
    monkeypatch.setattr(decode.peers.port._transport, "checksum", lambda peer, indices: 0)  # not what was sent
    ask(decode, "r", [5] * 40, "p")
    log.wait_for_ends(["r"])
    assert log.tokens("r") == expected([5] * 40)
    counters = decode.engine.counters
    assert (counters.fetches[LossReason.CHECKSUM.value], counters.kv_used_tokens) == ((1, 0) if checked else (0, 39))


@pytest.mark.parametrize("differs", ["model", "secret"])
def test_instances_of_another_model_or_fleet_are_no_peers_and_the_prompt_is_prefilled_here(
    opened: Callable[..., Instance], log: Log, differs: str
) -> None:
    decode, other = opened("d"), opened("p", **{differs: "another"})
    decode.peers.meet({"p": other.peers.address})
    wait_until(lambda: decode.peers.figures()["pdmux_kv_refused_peers_total"])
    ask(decode, "r", [5] * 40, "p")
    log.wait_for_ends(["r"])
    assert log.tokens("r") == expected([5] * 40)
    assert decode.engine.counters.fetches[LossReason.PEER_INCOMPATIBLE.value] == 1


def test_a_peer_is_given_up_when_it_has_gone_and_nobody_names_it_any_more(opened: Callable[..., Instance]) -> None:
    decode, prefill, second = opened("d"), opened("p"), opened("q")
    decode.peers.meet({"p": prefill.peers.address, "q": second.peers.address})
    wait_until(lambda: sorted(decode.peers.linked()) == ["p", "q"])
    decode.peers.meet({"q": second.peers.address})
    assert sorted(decode.peers.linked()) == ["p", "q"], "one that a gateway does not know of, or does not name yet"
    prefill.close()
    wait_until(lambda: decode.peers.linked() == ["q"])
    decode.peers.meet({"q": second.peers.address})
    wait_until(lambda: not decode.peers.called - {"q"})


def test_an_address_that_is_none_costs_that_peer_and_nothing_else(opened: Callable[..., Instance], log: Log) -> None:
    decode, prefill = opened("d"), opened("p")
    wrong = {"q": "prefill-0:5600", "r": "127.0.0.1:99999", "s": "127.0.0.1", "d": decode.peers.address}
    decode.peers.meet({**wrong, "p": prefill.peers.address})
    wait_until(lambda: decode.peers.linked() == ["p"])
    assert decode.peers.figures()["pdmux_kv_refused_peers_total"] == len(wrong)
    ask(decode, "r", [5] * 40, "q", "p")
    log.wait_for_ends(["r"])
    assert log.tokens("r") == expected([5] * 40)
    assert decode.engine.counters.kv_used_tokens == 39
    assert decode.engine.problem() is None
