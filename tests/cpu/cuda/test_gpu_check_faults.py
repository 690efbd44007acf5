"""`pdmux gpu-check` when something fails amid it, and what its comparison of operations meets."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.cpu


def lab(directory: Path, **faults: Any) -> Any:
    from pdmux_ray.device.cuda.recording import RecordingStreams
    from pdmux_ray.gpu_check.lab import Lab
    from pdmux_ray.gpu_check.sizes import DRY

    return Lab(RecordingStreams(**faults), DRY, directory, dry=True, deadline_s=0.0)


def run_checks(shared: Any, *runs: Any) -> Any:
    """The report of checks that have these functions."""
    from pdmux_ray.gpu_check.command import _run_checks
    from pdmux_ray.gpu_check.registry import Check
    from pdmux_ray.gpu_check.report import Report

    found = Report(shared.folder, {}, lambda line: None)
    _run_checks([Check(run.__name__, "", 1.0, run) for run in runs], shared, found)
    return found


def tiny_runner(shared: Any) -> Any:
    from pdmux_ray.gpu_check.settings import Multiplex

    return shared.runner(shared.sizes.small, shared.settings(shared.sizes.kv_gib[0], 2, 16, Multiplex()))


def test_a_check_that_raises_leaves_no_runner_amid_a_step_to_the_next_one(tmp_path: Path) -> None:
    from pdmux_ray.gpu_check.report import Row

    shared, runners = lab(tmp_path), list[Any]()

    def raises(shared: Any) -> Any:
        runners.append(tiny_runner(shared))
        yield Row("first", 1)
        raise RuntimeError("an illegal address")

    def goes_on(shared: Any) -> Any:
        runners.append(tiny_runner(shared))
        yield Row("second", 2)

    found = run_checks(shared, raises, goes_on)
    assert [[row.what for row in part.rows] for part in found.parts] == [["first", "it ended with an error"], ["second"]]
    assert runners[0] is not runners[1]
    shared.close()


def test_a_device_that_cannot_even_be_left_costs_no_result(tmp_path: Path) -> None:
    from pdmux_ray.device.cuda.recording import RecordingStreams
    from pdmux_ray.gpu_check.report import Row

    class Broken(RecordingStreams):
        def settle(self) -> None:
            raise RuntimeError("an illegal address")

    def raises(shared: Any) -> Any:
        shared.compute(lambda: None)
        yield from ()

    def goes_on(shared: Any) -> Any:
        yield Row("second", 2)

    shared = lab(tmp_path)
    shared.streams = Broken()
    found = run_checks(shared, raises, goes_on)
    assert [[row.what for row in part.rows] for part in found.parts] == [["it ended with an error"], ["second"]]


def test_a_runner_that_could_not_be_opened_leaves_its_memory_to_the_next_one(tmp_path: Path) -> None:
    shared, left = lab(tmp_path), Ring()
    gc.disable()
    try:
        seen = weakref.ref(left)
        del left
        assert seen() is not None
        tiny_runner(shared)
        assert seen() is None
    finally:
        gc.enable()
        shared.close()


class Ring:
    """Only the collector of garbage frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_the_collector_of_garbage_does_not_pass_amid_a_check(tmp_path: Path) -> None:
    from pdmux_ray.gpu_check.report import Row

    def passes(shared: Any) -> Any:
        yield Row("passes", int(gc.isenabled()))

    assert run_checks(lab(tmp_path), passes).parts[0].rows[0].value == 0
    assert gc.isenabled()


def test_checks_go_on_with_a_decode_graph_that_seems_to_be_elsewhere(tmp_path: Path) -> None:
    shared = lab(tmp_path, stray={99})
    tiny_runner(shared)
    shared.close()


def test_kernels_are_compared_on_mixed_steps_on_many_sequences_and_far_into_a_pool(tmp_path: Path) -> None:
    from pdmux_ray.gpu_check.operations import RELATIVE_ERROR, attention_error, mixed, steps

    shared = lab(tmp_path)
    assert max(len(step.contexts) for step in steps(shared)) > 32
    assert 3 in [step.decodes for step in steps(shared)]
    assert RELATIVE_ERROR.holds(attention_error(shared, mixed(24, 16), 8, pages_before=100))


def test_a_gpu_without_room_for_a_large_pool_is_not_judged_by_it(tmp_path: Path) -> None:
    from pdmux_ray.gpu_check.operations import _far

    row = _far(lab(tmp_path, free_bytes=2**12))
    assert (row.value, row.verdict) == ("not run", "not judged")
