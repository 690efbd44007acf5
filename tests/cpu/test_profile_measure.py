"""Measuring for a profile, on the real CPU runner: what is asked for is what runs, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_models import save_tiny

from pdmux_ray.clock import WallClock
from pdmux_ray.config import EngineConfig
from pdmux_ray.device.base import SPIN_ROUNDS, build_runner
from pdmux_ray.device.cpu.cores import usable_cores
from pdmux_ray.device.cpu.runner import CpuRunner
from pdmux_ray.device.cpu.workers import PREFILL_NICE
from pdmux_ray.latency.design import Point
from pdmux_ray.latency.identity import Identified, ProfileMismatchError, check, identify
from pdmux_ray.latency.measure import PointBench
from pdmux_ray.latency.probe import probe
from pdmux_ray.policy.views import Piece
from pdmux_ray.types import Mode, Split

pytestmark = [pytest.mark.cpu, pytest.mark.skipif(usable_cores() < 2, reason="lanes need two cores")]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def runner(model_dir: Path) -> Iterator[CpuRunner]:
    config = EngineConfig(device="cpu", threads=2, mode=Mode.AUTO, page_size=4, kv_cache_gib=0.01, dtype="float32")
    made = build_runner(model_dir, config)
    assert isinstance(made, CpuRunner)
    yield made
    made.close()


@pytest.mark.parametrize("split", [Split(1, 1), Split(0, 2)])
def test_decodes_alone_are_timed_on_the_units_of_their_split(runner: CpuRunner, split: Split) -> None:
    (record,) = PointBench(runner, WallClock()).measure(Point("decode", "fit", split, (5, 9), (), 6))
    assert (record.units, record.beside, record.batch, record.context_tokens) == (split.decode_units, 0, 2, 14)
    assert len(record.times_s) == 6
    assert min(record.times_s) > 0


@pytest.mark.parametrize("split", [Split(1, 1), Split(2, 0)])
def test_blocks_of_a_prefill_are_timed_with_and_without_the_last_layer(runner: CpuRunner, split: Split) -> None:
    records = PointBench(runner, WallClock()).measure(Point("prefill", "fit", split, (), (Piece(7, 4), Piece(3, 0)), 5, 1e-9))
    assert {record.units for record in records} == {split.prefill_units}
    assert {record.last for record in records} == {False, True}
    assert all(record.pieces == (Piece(7, 4), Piece(3, 0)) for record in records)


@pytest.mark.parametrize("split", [Split(1, 1), Split(1, 2)])
def test_lanes_beside_each_other_are_both_timed(runner: CpuRunner, split: Split) -> None:
    found = PointBench(runner, WallClock()).measure(Point("decode", "fit", split, (4,), (Piece(200, 0),), 8))
    assert {(record.kind, record.units, record.beside) for record in found} == {
        ("decode", split.decode_units, 1),
        ("prefill", 1, split.decode_units),
    }


def test_a_step_in_one_pass_is_timed_and_no_job_is_left(runner: CpuRunner) -> None:
    bench = PointBench(runner, WallClock())
    (record,) = bench.measure(Point("mixed", "fit", None, (4, 4), (Piece(6, 0),), 3))
    assert (record.kind, record.batch, len(record.times_s)) == ("mixed", 2, 3)
    assert bench.switch_s(runner.splits[-1], repeats=5) >= 0
    assert runner.block_done()


def test_the_runner_says_what_a_profile_of_it_is_of(runner: CpuRunner, model_dir: Path) -> None:
    assert isinstance(runner, Identified)
    identity = identify(model_dir, runner)
    assert (identity.units, identity.dtype, identity.page_size) == (2, "float32", 4)
    assert identity.settings == f"OMP_WAIT_POLICY=active, GOMP_SPINCOUNT={SPIN_ROUNDS}, prefills nice {PREFILL_NICE}"


def test_a_profile_of_threads_that_spin_longer_does_not_fit(
    runner: CpuRunner, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = identify(model_dir, runner)
    monkeypatch.setenv("GOMP_SPINCOUNT", "9000")
    other = build_runner(model_dir, EngineConfig(device="cpu", threads=2, page_size=4, kv_cache_gib=0.01, dtype="float32"))
    assert isinstance(other, CpuRunner)
    with pytest.raises(ProfileMismatchError, match=r"settings: profiled '.*GOMP_SPINCOUNT=9000.*', here '.*=300,"):
        check(identify(model_dir, other), here, "the profile")
    other.close()


def test_two_cores_move_and_compute_something() -> None:
    moved, computed = probe([1, 2], "float32")
    assert min(*moved, *computed) > 0
