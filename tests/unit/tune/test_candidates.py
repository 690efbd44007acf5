"""What may be chosen, and what it could carry at best."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmux_ray.config import parse_app_config
from pdmux_ray.errors import ConfigError
from pdmux_ray.metrics.goodput import Slo
from pdmux_ray.tune.candidates import LOCAL, PREDICT, REMOTE, Candidate, Kind, Route, Space, Topology, configured, merged
from pdmux_ray.tune.estimate import Work, work
from pdmux_ray.tune.served import base_settings
from pdmux_ray.types import Mode, Role
from tests.unit.sim.fleets import COSTS, LAYERS, PAGE, PAGES, UNITS, device

SPACE = Space(8, (1, 2, 8), (Mode.AUTO, Mode.CHUNKED), (512, 2048))
BASE = base_settings("demo", Slo(ttft_s=0.5, itl_s=0.05))
splits = st.builds(Topology, st.sampled_from([1, 2]), st.integers(1, 5), st.integers(0, 5), st.integers(1, 5))


def test_every_topology_uses_every_gpu_once_and_somebody_decodes() -> None:
    found = list(SPACE.topologies())
    assert len(set(found)) == len(found)
    assert {topology.instances * topology.tp for topology in found} == {8}
    assert all(topology.mux + topology.decode for topology in found)
    assert all(topology.mux for topology in found if not topology.prefill)  # who only decodes needs somebody who prefills
    assert [sum(topology.tp == tp for topology in found) for tp in SPACE.tps] == [36, 10, 1]


def test_a_number_of_gpus_that_is_no_whole_number_of_instances_is_refused() -> None:
    with pytest.raises(ConfigError, match="6 GPUs are no whole number of instances of 4 GPUs"):
        Space(6, (1, 4), (Mode.AUTO,), ())


def test_an_aggregated_topology_is_tried_in_every_mode_and_others_once_at_first() -> None:
    first = SPACE.first()
    assert {candidate.mode for candidate in first if candidate.topology.kind is Kind.AGGREGATED} == {Mode.AUTO, Mode.CHUNKED}
    others = [candidate for candidate in first if candidate.topology.kind is not Kind.AGGREGATED]
    assert len({candidate.topology for candidate in others}) == len(others)
    assert {(candidate.mode, candidate.route) for candidate in others} == {(Mode.AUTO, PREDICT)}


def test_a_topology_s_variants_are_other_modes_or_other_routes_and_none_is_tried_already() -> None:
    mixed = Topology(1, 2, 6, 0)
    found = [(candidate.mode, str(candidate.route)) for candidate in SPACE.variants(mixed)]
    assert found == [(Mode.CHUNKED, "predict"), (Mode.AUTO, "threshold 512"), (Mode.AUTO, "threshold 2048")]
    assert [candidate.route for candidate in SPACE.variants(Topology(1, 2, 0, 6))] == [REMOTE]
    assert SPACE.variants(Topology(1, 0, 8, 0)) == []


@given(st.integers(1, 8))
def test_an_aggregated_candidate_s_configuration_has_its_instances_and_no_topology(count: int) -> None:
    config = parse_app_config(configured(BASE, Candidate(Topology(1, 0, count, 0), Mode.CHUNKED, LOCAL), 1e9))
    assert (config.topology, config.instances, config.engine.mode) == (None, count, Mode.CHUNKED)
    assert config.engine.multiplex.itl_s == 0.05


@given(splits)
def test_another_candidate_s_configuration_has_its_roles_and_route(topology: Topology) -> None:
    config = parse_app_config(configured(BASE, Candidate(topology, Mode.AUTO, Route("threshold", 2048)), 2e9))
    counts = [config.roles.count(role) for role in (Role.PREFILL, Role.MUX, Role.DECODE)]
    assert counts == [topology.prefill, topology.mux, topology.decode]
    routing = config.gateway.routing
    assert (routing.policy, routing.threshold_tokens, routing.bandwidth) == ("threshold", 2048, 2e9)


def test_groups_of_settings_are_merged_and_neither_side_changes() -> None:
    base = {"a": {"b": 1, "c": 2}, "d": 3}
    assert merged(base, {"a": {"c": 4}, "d": {"e": 5}}) == {"a": {"b": 1, "c": 4}, "d": {"e": 5}}
    assert base == {"a": {"b": 1, "c": 2}, "d": 3}


def test_candidates_are_named_by_what_matters_of_them() -> None:
    assert str(Candidate(Topology(2, 0, 4, 0), Mode.CHUNKED, LOCAL)) == "4M, TP 2, chunked"
    assert str(Candidate(Topology(1, 3, 0, 5), Mode.AUTO, PREDICT)) == "3P+5D, TP 1, predict"
    assert str(Candidate(Topology(1, 1, 2, 1), Mode.AUTO, Route("threshold", 512))) == "1P+2M+1D, TP 1, auto, threshold 512"


@given(prefill_s=st.floats(0.01, 10), decode_s=st.floats(0.01, 10))
def test_no_topology_could_carry_more_than_an_aggregated_one_that_loses_nothing(prefill_s: float, decode_s: float) -> None:
    of = Work(prefill_s, decode_s)
    most = of.most_rps(Topology(1, 0, 8, 0))
    assert most == pytest.approx(8 / (prefill_s + decode_s))
    assert all(of.most_rps(topology) <= most * 1.000001 for topology in Space(8, (1,), (Mode.AUTO,), ()).topologies())


def test_a_split_by_roles_carries_what_its_busier_side_does() -> None:
    assert Work(1.0, 2.0).most_rps(Topology(1, 2, 0, 6)) == pytest.approx(2.0)
    assert Work(1.0, 6.0).most_rps(Topology(1, 2, 0, 6)) == pytest.approx(1.0)
    assert Work(1.0, 6.0).most_rps(Topology(1, 2, 6, 0)) == pytest.approx(1.0)


def test_the_work_of_a_request_is_its_prefill_and_its_part_of_the_largest_batch_that_keeps_the_objective() -> None:
    found = work(device(), [(100, 10)], 0.0, itl_s=0.012, max_batch=64)
    assert found.prefill_s == pytest.approx(COSTS.prefill([(100, 0)], LAYERS, UNITS, 0, last=True).predicted_s)  # type: ignore[list-item]
    batch = max(b for b in range(1, 65) if b * 105 <= PAGES * PAGE and COSTS.decode(b, b * 105, UNITS, 0).predicted_s <= 0.012)
    assert found.decode_s == pytest.approx(10 * COSTS.decode(batch, batch * 105, UNITS, 0).predicted_s / batch)


def test_what_prefix_caches_have_is_not_prefilled() -> None:
    none, half = (work(device(), [(100, 10)], cached, itl_s=0.05, max_batch=64) for cached in (0.0, 0.5))
    assert half.prefill_s < none.prefill_s
    assert half.decode_s == none.decode_s
