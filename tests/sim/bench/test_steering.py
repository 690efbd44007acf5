"""Policies of routing that are compared: what each server is started with, what it is given, and what it has counted."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from pdmux_ray.bench import steering
from pdmux_ray.bench.claims import Verdict
from pdmux_ray.bench.steering import EVERY, LONG, POLICIES, PREDICT, YARDSTICK, Routes, command, found_claims, routes_table
from pdmux_ray.config import AppConfig, load_serve_config
from pdmux_ray.metrics.gateway_metrics import GatewayMetrics
from pdmux_ray.metrics.goodput import Slo
from pdmux_ray.policy.decisions import RouteChoice, RouteReason
from pdmux_ray.types import Mode, Role
from tests.sim.bench.test_comparison import session_of

SLO = Slo(ttft_s=0.2, ttft_s_per_token=0.002, itl_s=0.03)


def config_of(name: str, slo: Slo | None = SLO) -> AppConfig:
    words = shlex.split(command(Path("/profiles/one-core.json"), name, slo).format(model="m", port=1))
    overrides = [words[index + 1] for index, word in enumerate(words) if word == "--set"]
    _, config = load_serve_config(Path(words[1]), overrides)
    return config


def test_policies_differ_in_how_they_route_alone() -> None:
    configs = [config_of(name) for name in POLICIES]
    assert [config.gateway.routing.policy for config in configs] == ["predict", "local", "remote", "threshold", "threshold"]
    assert {config.roles for config in configs} == {(Role.PREFILL, Role.MUX)}
    (engine,) = {config.engine.model_dump_json() for config in configs}
    assert Mode.AUTO.value in engine
    assert configs[0].engine.multiplex.itl_s == SLO.itl_s


def test_the_yardstick_needs_neither_objectives_nor_a_profile() -> None:
    config = config_of(YARDSTICK, None)
    assert (config.gateway.routing.policy, config.engine.mode) == ("local", Mode.PREFILL_FIRST)
    assert config.engine.multiplex.profile is None


def test_one_request_of_ten_is_long_at_any_place() -> None:
    asks = steering.workload().asks(200, 3)
    assert asks[:70] == steering.workload().asks(70, 3)
    places = [index for index, ask in enumerate(asks) if len(ask.prompt) >= LONG.prompt.least]
    assert [place // EVERY for place in places] == list(range(200 // EVERY))
    assert len({place % EVERY for place in places}) > 3
    assert max(len(ask.prompt) for ask in asks) <= 2000
    outputs = [ask.output_tokens or 0 for ask in asks]
    long = [outputs[place] for place in places]
    assert sum(long) / len(long) < (sum(outputs) - sum(long)) / (len(outputs) - len(long))


def exposition(choices: list[RouteChoice], landed: int) -> str:
    figures = {"one": {"pdmux_fetches_total": {"landed": landed, "refused": 7}}}
    metrics = GatewayMetrics("g", dict, lambda: figures)
    for choice in choices:
        metrics.routed(choice)
        metrics.ttft_s.observe(0.3)
    return metrics.exposition().decode()


def test_what_servers_count_is_summed_over_rounds() -> None:
    remote = RouteChoice("d", RouteReason.REMOTE, ("p",), predicted_ttft_s=0.1)
    routes = Routes()
    for _ in range(2):
        routes.add(exposition([remote, RouteChoice("d", RouteReason.LOCAL, predicted_ttft_s=0.3)], landed=1))
    assert routes.cells == ["4", "50 %", "local 50%, remote 50%", "200", "300"]
    assert routes_table({"local": Routes()})[-1] == "| never fetched | 0 | – | – | – | – |"


def test_predicting_must_carry_more_than_each_other_policy_and_as_much_is_not_more(tmp_path: Path) -> None:
    more, less = {1.0: 1.0, 2.0: 1.0, 4.0: 0.5}, {1.0: 1.0, 2.0: 0.5}
    good = {PREDICT: more, "local": less, "remote": more}
    found = found_claims({name: session_of(tmp_path, name, each) for name, each in good.items()})
    assert [claim.over for claim in found] == ["never fetched", "always fetched"]
    assert [claim.verdict is Verdict.HOLDS for claim in found] == [True, False]
    assert found[0].cells[1] == "predict ≥ 1.01 × never fetched"


@pytest.mark.parametrize(("peers", "linked"), [([], False), (["p"], False), (["p", "q"], True)])
def test_a_server_is_measured_once_all_its_instances_are_linked(peers: list[str], linked: bool) -> None:
    listed = [{"id": name, "role": "prefill", "peers": []} for name in "pq"] + [{"id": "d", "role": "mux", "peers": peers}]
    assert steering.linked(json.dumps({"instances": listed})) is linked


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--targets", "auto"], "no target 'auto'"),
        (["--shares", "0"], "--shares"),
        (["--rounds", "0"], "--rounds"),
        (["--profile", "/nowhere.json"], "does not exist"),
    ],
)
def test_wrong_arguments_end_it_with_2(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).touch()
    assert steering.main([*arguments, "--model", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert says in capsys.readouterr().err
