"""What a step tells the device: packed in one buffer, and the same numbers that the host's own sampler would use."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_runner import Sequence

from pdmux_ray.device.cuda.graphs import bucket_sizes
from pdmux_ray.device.cuda.inputs import Field, Packed, PageTables, packed_for, sampling_arrays, uniforms
from pdmux_ray.device.uniform import uniform
from pdmux_ray.errors import ConfigError
from pdmux_ray.types import SamplingParams

pytestmark = pytest.mark.cpu

SEEDS = st.integers(0, 2**63 - 1)
POSITIONS = st.integers(0, 2**31)
DTYPES = (torch.int64, torch.int32, torch.float32)


@given(st.lists(st.tuples(SEEDS, POSITIONS), max_size=5))
def test_the_random_numbers_are_those_of_the_host(drawn: list[tuple[int, int]]) -> None:
    seeds, positions = (np.array([pair[at] for pair in drawn], dtype=np.uint64) for at in (0, 1))
    found = uniforms(seeds, positions)
    assert found.dtype == np.float32
    assert found.tolist() == pytest.approx([uniform(*pair) for pair in drawn], abs=2**-24)


def test_a_random_number_stays_below_one_when_it_is_rounded() -> None:
    def almost_one(seed: int) -> bool:
        return uniform(seed, 0) > 1 - 2**-26

    seed = next(filter(almost_one, _seeds_of(2**53 - 1)))
    assert uniforms(np.array([seed], dtype=np.uint64), np.array([0], dtype=np.uint64))[0] < 1


def _seeds_of(number: int) -> list[int]:
    """Seeds whose number at position 0 is `number` * 2**-53: splitmix64's output function, inverted twice."""
    found = []
    for low in range(2**11):
        seed = _unmix(_unmix(number << 11 | low))
        if seed < 2**63:
            found.append(seed)
    return found


def _unmix(x: int) -> int:
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9)):
        x = _unshift(x, shift) * pow(factor, -1, 2**64) % 2**64
    return _unshift(x, 30)


def _unshift(x: int, by: int) -> int:
    """The x for which x ^ x >> by is this."""
    found = x
    for _ in range(64 // by + 1):
        found = x ^ found >> by
    return found


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3), st.sampled_from(DTYPES)), max_size=6))
def test_arrays_lie_in_one_buffer_without_touching_each_other(shapes: list[tuple[int, int, torch.dtype]]) -> None:
    packed = Packed({str(at): Field((rows, width), dtype) for at, (rows, width, dtype) in enumerate(shapes)})
    buffer = torch.zeros(packed.nbytes, dtype=torch.uint8)
    arrays = packed.arrays(buffer)
    for at, array in enumerate(arrays.values()):
        array[...] = at + 1
    for at, (name, tensor) in enumerate(packed.tensors(buffer).items()):
        assert (tuple(tensor.shape), tensor.dtype) == (shapes[at][:2], shapes[at][2])
        assert bool((tensor == at + 1).all()), name
        assert (tensor.data_ptr() - buffer.data_ptr()) % 16 == 0


def test_a_buffer_is_as_large_as_its_arrays() -> None:
    arrays = {"ids": np.arange(3), "table": np.ones((2, 5), dtype=np.int32)}
    packed = packed_for(arrays)
    buffer = torch.zeros(packed.nbytes, dtype=torch.uint8)
    for name, target in packed.arrays(buffer).items():
        target[...] = arrays[name]
    assert {name: tensor.tolist() for name, tensor in packed.tensors(buffer).items()} == {
        name: array.tolist() for name, array in arrays.items()
    }
    assert packed.nbytes == 32 + 48


def test_a_greedy_row_has_temperature_zero_and_others_have_what_they_ask_for() -> None:
    drawn = SamplingParams(temperature=0.7, top_k=5, top_p=0.5, min_p=0.25, seed=3)
    rows = sampling_arrays([Sequence([1, 2], [0], drawn), Sequence([1], [0], SamplingParams(temperature=1e-4))])
    assert rows["temperature"].tolist() == pytest.approx([0.7, 0.0])
    assert [rows[name][0] for name in ("top_k", "top_p", "min_p")] == [5, 0.5, 0.25]
    assert rows["uniforms"][0] == pytest.approx(uniform(3, 2))


@given(st.data())
def test_a_page_table_is_that_of_the_sequence_however_it_changes(data: st.DataObject) -> None:
    tables, sequences = PageTables(), [Sequence([1], [7], request_id=name) for name in "ab"]
    for _ in range(6):
        tables.begin_step()
        for sequence in data.draw(st.lists(st.sampled_from(sequences))):
            change = data.draw(st.sampled_from(["grow", "replace", "shrink", "stay"]))
            if change == "grow":
                sequence.pages.append(data.draw(st.integers(0, 99)))
            elif change == "replace":
                sequence.pages = data.draw(st.lists(st.integers(0, 99), max_size=5))
            elif change == "shrink":
                del sequence.pages[1:]
            assert tables.of(sequence).tolist() == sequence.pages


def test_tables_that_nobody_asks_for_are_forgotten() -> None:
    tables = PageTables()
    tables.of(Sequence([1], [7], request_id="gone"))
    for _ in range(600):
        tables.begin_step()
        tables.of(Sequence([1], [7], request_id="here"))
    assert list(tables._tables) == ["here"]


@given(st.integers(1, 2000))
def test_buckets_end_at_the_largest_batch_and_waste_little(max_batch: int) -> None:
    sizes = bucket_sizes(max_batch)
    assert sizes[-1] == max_batch
    assert list(sizes) == sorted(set(sizes))
    assert len(sizes) <= 40
    gaps = [(low, high) for low, high in pairwise(sizes) if low >= 8]
    assert all(high - low <= max(8, low // 3) for low, high in gaps)


def test_buckets_that_are_asked_for_end_at_the_largest_batch_too() -> None:
    assert bucket_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert bucket_sizes(20, [32, 4, 4]) == (4, 20)
    with pytest.raises(ConfigError, match=r"ends at 8, but engine.max_batch is 9"):
        bucket_sizes(9, [8])
