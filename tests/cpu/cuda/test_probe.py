"""What lanes are said to give: every level of every split is measured, on its own stream."""

from __future__ import annotations

import pytest
import torch

from pdmux_ray.device.cuda.probe import TIMES, WARM_UP, probe
from pdmux_ray.device.cuda.recording import RecordingStreams
from pdmux_ray.types import Split

pytestmark = pytest.mark.cpu


def test_each_number_of_units_is_measured_on_a_stream_that_has_so_many() -> None:
    streams = RecordingStreams(units=8, splits=(Split(6, 2), Split(3, 5)))
    copied, computed = probe(streams, [2, 3, 5, 6, 8], torch.float32, copy_bytes=1024, gemm=8)
    assert len(copied) == len(computed) == 5
    assert min(*copied, *computed) > 0
    used = {stream.units: stream.calls["run"] for stream in streams.all if stream.calls["run"]}
    assert used == dict.fromkeys([2, 3, 5, 6, 8], 2 * (WARM_UP + TIMES))


def test_a_number_of_units_that_no_lane_has_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"no lane has 4 SMs; there are 2, 6, 8"):
        probe(RecordingStreams(units=8, splits=(Split(6, 2),)), [8, 4], torch.float32)
