from __future__ import annotations

import pytest

from pdmux_ray.config import EngineConfig, FakeConfig, RoutingConfig
from pdmux_ray.policy.decisions import RouteReason
from pdmux_ray.policy.views import InstanceView
from pdmux_ray.serve.router import ENOUGH_BYTES, Candidate, Device, Router, RouterSettings, bandwidth_of
from pdmux_ray.types import Role

PROMPT = list(range(100))
DEVICE = Device(layers=8, units=8, one_pass_tokens=None, kv_bytes_per_token=128)


def candidate(name: str, role: Role = Role.MUX, *linked: str, waiting: int = 0) -> Candidate:
    view = InstanceView(
        instance_id=name,
        running=0,
        waiting=waiting,
        free_pages=100,
        step_age_s=0.0,
        silence_s=0.0,
        on_their_way=0,
        line_is_up=True,
        leaving=False,
        ailing=False,
        role=role,
        peers=frozenset(linked),
    )
    return Candidate(view, DEVICE, 100)


def router(policy: str = "threshold", *, topology: bool = True, **engine: object) -> Router:
    routing = RoutingConfig.model_validate({"policy": policy, "threshold_tokens": 50})
    return Router(RouterSettings(routing, EngineConfig.model_validate(engine), topology))


def fleet(*candidates: Candidate) -> dict[str, Candidate]:
    return {each.view.instance_id: each for each in candidates}


def test_a_long_prompt_is_fetched_and_its_prefill_is_counted_where_it_is_done() -> None:
    instances = fleet(candidate("d", Role.DECODE, "p"), candidate("p", Role.PREFILL))
    choice, tokens = router().choose(PROMPT, instances, None)
    assert (choice.instance_id, choice.prefill, choice.reason, tokens) == ("d", ("p",), RouteReason.LONG, 100)


def test_nothing_is_fetched_from_whom_the_decode_instance_is_not_linked_to() -> None:
    instances = fleet(candidate("d", Role.MUX, "q"), candidate("p", Role.PREFILL), candidate("q", Role.PREFILL))
    assert {router().choose(PROMPT, instances, None)[0].prefill for _ in range(10)} == {("q",)}
    instances = fleet(candidate("d", Role.MUX), candidate("p", Role.PREFILL))
    choice, _ = router().choose(PROMPT, instances, None)
    assert (choice.prefill, choice.reason) == ((), RouteReason.NO_PREFILL_FIT)


def test_what_was_sent_somewhere_is_thought_to_be_cached_there() -> None:
    instances = fleet(candidate("one"), candidate("other"))
    route = router("local")
    first, _ = route.choose(PROMPT, instances, None)
    again, tokens = route.choose([*PROMPT, 7], instances, None)
    assert (again.instance_id, again.reason, tokens) == (first.instance_id, RouteReason.PREFIX, 101 - 96)
    route.keep_only(["neither"])
    assert route.choose(PROMPT, instances, None)[1] == 100


def test_prefixes_are_not_remembered_where_none_are_cached() -> None:
    route = router("local", prefix_cache=False)
    instances = fleet(candidate("one"), candidate("other"))
    assert [route.choose(PROMPT, instances, None)[1] for _ in range(3)] == [100] * 3


def test_without_a_topology_load_alone_counts() -> None:
    instances = fleet(candidate("one", waiting=3), candidate("other"))
    choice, _ = router("remote", topology=False).choose(PROMPT, instances, None)
    assert (choice.instance_id, choice.reason, choice.prefill) == ("other", RouteReason.LEAST_LOADED, ())


def test_a_prediction_is_made_with_the_latency_model_that_the_engine_has() -> None:
    instances = fleet(candidate("d", Role.DECODE, "p"), candidate("p", Role.PREFILL))
    fake = FakeConfig(step_s=0.01, prefill_s_per_token=0.001)
    choice, _ = router("predict", device="fake", fake=fake).choose(PROMPT, instances, None)
    assert choice.predicted_ttft_s is not None
    without, _ = router("predict").choose(PROMPT, instances, None)
    assert (without.predicted_ttft_s, without.reason, without.prefill) == (None, RouteReason.NO_MODEL, ("p",))


@pytest.mark.parametrize(
    ("moved", "seconds", "bandwidth"), [(0, 0.0, None), (ENOUGH_BYTES - 1, 1.0, None), (ENOUGH_BYTES, 2.0, ENOUGH_BYTES / 2)]
)
def test_the_bandwidth_is_what_was_measured_once_that_is_enough(moved: int, seconds: float, bandwidth: float | None) -> None:
    figures = {"pdmux_kv_written_bytes_total": moved, "pdmux_kv_written_seconds_total": seconds}
    assert bandwidth_of([{}, figures]) == bandwidth
