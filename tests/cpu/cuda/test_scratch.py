"""The static buffers of a lane."""

from __future__ import annotations

import pytest
import torch

from pdmux_ray.device.cuda.scratch import Scratch
from pdmux_ray.errors import IntegrityError

pytestmark = pytest.mark.cpu


def test_a_buffer_keeps_its_address_whatever_is_asked_of_it() -> None:
    scratch = Scratch("cpu", torch.float16, max_tokens=10)
    first = scratch.view("a", 3, 8)
    assert (first.shape, first.dtype) == ((3, 8), torch.float16)
    assert {scratch.view("a", rows, 8).data_ptr() for rows in (1, 10, 2)} == {first.data_ptr()}


def test_names_sizes_and_dtypes_have_buffers_of_their_own() -> None:
    scratch = Scratch("cpu", torch.float16, max_tokens=10)
    views = [scratch.view("a", 3, 8), scratch.view("b", 3, 8), scratch.view("a", 3, 9), scratch.view("a", 3, 8, torch.float32)]
    views.append(scratch.view("a", 3, 8, most=4))
    assert len({view.data_ptr() for view in views}) == 5
    assert scratch.allocated_bytes == 10 * (8 * 2 + 8 * 2 + 9 * 2 + 8 * 4) + 4 * 8 * 2


def test_a_longer_step_than_the_lane_was_made_for_is_an_error_that_says_so() -> None:
    scratch = Scratch("cpu", torch.float16, max_tokens=10)
    with pytest.raises(IntegrityError, match="needs 11 rows of the scratch buffer 'a', which has 10"):
        scratch.view("a", 11, 8)
    with pytest.raises(IntegrityError, match="which has 4"):
        scratch.view("b", 5, 8, most=4)


def test_after_the_warm_up_a_new_buffer_is_an_error_that_names_it() -> None:
    scratch = Scratch("cpu", torch.float16, max_tokens=10)
    scratch.view("a", 1, 8)
    scratch.freeze()
    scratch.view("a", 10, 8)
    with pytest.raises(IntegrityError, match=r"'a' \(10 x 9, torch.float16\).*before freeze"):
        scratch.view("a", 1, 9)
