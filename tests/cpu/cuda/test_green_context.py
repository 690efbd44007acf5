"""Green contexts over a stand-in for libcuda that keeps to the documented rules, through the real cuda-bindings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("cuda.bindings.driver")

from stand_in import BY_COUNT, OLDEST, STRUCTURED, UNSTATED, Made, StandIn

from pdmux_ray.device.cuda.splits import SmResource, feasible_splits

pytestmark = pytest.mark.cpu

DRIVERS = (STRUCTURED, BY_COUNT, UNSTATED, OLDEST)
EVERY_DRIVER = pytest.mark.parametrize("driver", DRIVERS)
H200 = [(116, 16), (100, 32), (84, 48), (68, 64), (52, 80), (36, 96)]


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    libcuda = StandIn(tmp_path_factory.mktemp("libcuda"))
    yield libcuda
    libcuda.close()


# What is made


@EVERY_DRIVER
def test_132_sms_split_24_to_decode_gives_24_and_108_and_both_are_read_back(stand_in: StandIn, driver: int) -> None:
    made = stand_in.made([(108, 24)], driver)
    ((prefill, decode),) = made.lanes
    assert made.splits == [(108, 24)]
    assert (prefill.partition.asked, prefill.partition.units, len(prefill.sms)) == (108, 108, 108)
    assert (decode.partition.asked, decode.partition.units, len(decode.sms)) == (24, 24, 24)
    assert made.warnings == []


@EVERY_DRIVER
def test_nobody_has_to_ask_for_splits(stand_in: StandIn, driver: int) -> None:
    assert stand_in.made(driver=driver).splits == H200


@EVERY_DRIVER
def test_the_lanes_of_a_split_share_no_sm_and_leave_none_out(stand_in: StandIn, driver: int) -> None:
    made = stand_in.made(driver=driver)
    for prefill, decode in made.lanes:
        assert prefill.sms & decode.sms == set()
        assert prefill.sms | decode.sms == made.whole.sms


@EVERY_DRIVER
def test_decode_on_the_whole_device_overlaps_every_capped_prefill(stand_in: StandIn, driver: int) -> None:
    made = stand_in.made(driver=driver)
    assert made.whole.partition.units == len(made.whole.sms) == 132
    assert all(prefill.sms < made.whole.sms for prefill, _ in made.lanes)


@EVERY_DRIVER
def test_every_partition_has_a_context_and_a_stream_of_its_own(stand_in: StandIn, driver: int) -> None:
    made = stand_in.made(driver=driver)
    partitions = [made.whole.partition, *(lane.partition for lanes in made.lanes for lane in lanes)]
    assert len({partition.stream for partition in partitions}) == 1 + 2 * len(H200)
    assert len({partition.context for partition in partitions}) == 1 + 2 * len(H200)
    assert {0} & {address for p in partitions for address in (p.stream, p.context)} == set()


@EVERY_DRIVER
def test_decodes_go_first_where_they_share_sms_with_a_prefill(stand_in: StandIn, driver: int) -> None:
    made = stand_in.made(driver=driver)
    prefills, decodes = zip(*made.lanes, strict=True)
    assert max(lane.priority for lane in (made.whole, *decodes)) < min(lane.priority for lane in prefills)  # lower goes first


@EVERY_DRIVER
def test_the_primary_context_is_held_first_and_none_is_left_current(stand_in: StandIn, driver: int) -> None:
    made = stand_in.made(driver=driver)
    assert made.log[0] == "primary"
    assert made.context_kept


# How it is made


def test_a_driver_of_13_1_puts_decode_into_a_structured_group(stand_in: StandIn) -> None:
    made = stand_in.made([(108, 24)])
    assert made.structured
    assert made.logged_as("structured") == ["sms=24 together=8 groups=1"]


@pytest.mark.parametrize("driver", [BY_COUNT, UNSTATED, OLDEST])
def test_a_driver_without_the_structured_call_splits_by_count(stand_in: StandIn, driver: int) -> None:
    made = stand_in.made([(108, 24)], driver)
    assert not made.structured
    assert made.logged_as("by count")[-1:] == ["least=24 size=24 groups=1"]


def test_bindings_without_the_structured_call_split_by_count_whatever_the_driver(stand_in: StandIn) -> None:
    made = stand_in.made_without("cuDevSmResourceSplit", [(108, 24)])
    assert (made.structured, made.splits) == (False, [(108, 24)])
    assert made.logged_as("by count") == ["least=24 size=24 groups=1"]


@pytest.mark.parametrize("granularity", [(4, 2), (8, 8), (2, 2), (16, 8)], ids=str)
def test_a_driver_that_states_no_granularity_shows_it_by_rounding(stand_in: StandIn, granularity: tuple[int, int]) -> None:
    minimum, alignment = granularity
    resource = stand_in.made(driver=UNSTATED, minimum=minimum, alignment=alignment).resource
    assert resource == {"count": 132, "minimum": minimum, "alignment": alignment}


@EVERY_DRIVER
def test_a_device_too_small_for_two_parts_has_no_splits(stand_in: StandIn, driver: int) -> None:
    made = stand_in.made(driver=driver, sms=12)
    assert (made.splits, made.whole.partition.units) == ([], 12)


def test_a_split_of_sglangs_table_makes_prefill_the_group(stand_in: StandIn) -> None:
    made = stand_in.made([(112, 20)], BY_COUNT)
    assert (made.splits, made.warnings) == ([(112, 20)], [])
    assert made.logged_as("by count") == ["least=112 size=112 groups=1"]


def test_a_structured_group_that_is_no_multiple_of_eight_is_together_in_fours(stand_in: StandIn) -> None:
    assert stand_in.made([(112, 20)]).logged_as("structured") == ["sms=20 together=4 groups=1"]


def test_every_lane_has_work_queues_that_no_other_lane_uses(stand_in: StandIn) -> None:
    made = stand_in.made()
    assert {re.sub(r"sms=\S+ ", "", green) for green in made.logged_as("green")} == {"scope=1 limit=1"}
    assert made.warnings == []  # the 32 queues that are asked for suffice


def test_more_lanes_than_work_queues_is_a_warning_with_both_numbers(stand_in: StandIn) -> None:
    (warning,) = stand_in.made(CUDA_DEVICE_MAX_CONNECTIONS=8).warnings
    assert "12 lanes share 8 work queues" in warning
    assert "CUDA_DEVICE_MAX_CONNECTIONS in the environment, to 32 at most" in warning


# What differs from what was asked for


@pytest.mark.parametrize("driver", [STRUCTURED, BY_COUNT])
def test_a_driver_that_makes_a_smaller_group_is_a_warning_with_both_numbers(stand_in: StandIn, driver: int) -> None:
    made = stand_in.made([(12, 120)], driver, short=6)
    assert made.splits == [(18, 114)]
    assert [(lane.partition.asked, lane.partition.units) for lane in made.lanes[0]] == [(12, 18), (120, 114)]
    (warning,) = made.warnings
    assert "12/120" in warning
    assert "18/114" in warning


def test_a_warning_is_logged_once(stand_in: StandIn) -> None:
    made = stand_in.made([(12, 120)], short=6)
    assert [line for line in made.logged if line.startswith("WARNING")] == [f"WARNING: {made.warnings[0]}"]


def test_the_actual_counts_are_logged(stand_in: StandIn) -> None:
    (line,) = stand_in.made([(12, 120)], short=6).logged[-1:]
    assert line.startswith("INFO: 132 SMs")
    assert line.endswith("prefill/decode 18/114")


def test_where_no_eight_sms_are_together_decode_gets_pairs_and_a_warning(stand_in: StandIn) -> None:
    made = stand_in.made([(108, 24)], together=4)
    assert (made.splits, made.logged_as("structured")) == ([(108, 24)], ["sms=24 together=2 groups=1"])
    (warning,) = made.warnings
    assert "24 SMs for decode are together in pairs, not in groups of 8" in warning


def test_a_split_of_our_own_that_the_driver_refuses_is_left_out_with_a_warning(stand_in: StandIn) -> None:
    made = stand_in.made(together=1)
    assert made.splits == []
    assert len(made.warnings) == len(H200)
    assert "116/16 SMs cannot be made: cuDevSmResourceSplit failed with CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION (915)" in (
        made.warnings
    )


def test_a_share_of_mps_is_a_warning(stand_in: StandIn) -> None:
    (warning,) = stand_in.made(CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50).warnings
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE is 50" in warning


# What cannot be made


@EVERY_DRIVER
def test_an_infeasible_split_is_refused_with_those_that_are_feasible(stand_in: StandIn, driver: int) -> None:
    error = stand_in.error([(108, 24), (100, 24)], driver)
    assert error.startswith("ConfigError: engine.cuda.splits: 100/24 (prefill/decode) cannot be made of 132 SMs")
    assert "Feasible here: 124/8, 120/12, 116/16, 112/20, 108/24, " in error


def test_a_split_that_is_asked_for_and_refused_by_the_driver_is_an_error_with_its_words(stand_in: StandIn) -> None:
    error = stand_in.error([(108, 24)], together=1)
    assert error.startswith("ConfigError: engine.cuda.splits: 108/24")
    assert "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION (915)" in error
    assert "Feasible here: 124/8" in error


def test_a_machine_without_a_gpu_is_told_that_the_cpu_config_is_cpu_mux_yaml(stand_in: StandIn) -> None:
    error = stand_in.error(devices=0)
    assert error.startswith("NoDeviceError: The NVIDIA driver finds no GPU.")
    assert "configs/cpu-mux.yaml" in error


def test_a_gpu_that_is_hidden_is_said_to_be(stand_in: StandIn) -> None:
    assert "CUDA_VISIBLE_DEVICES is ''." in stand_in.error(devices=0, CUDA_VISIBLE_DEVICES="")


def test_a_device_that_is_not_there_is_said_to_be_missing_with_how_many_are(stand_in: StandIn) -> None:
    assert "there is no CUDA device 2: 2 are visible" in stand_in.error(devices=2, index=2)


def test_the_second_device_can_be_taken(stand_in: StandIn) -> None:
    assert stand_in.made(devices=2, index=1).splits == H200


def test_a_machine_without_libcuda_is_told_what_is_missing_and_the_cpu_config(stand_in: StandIn, tmp_path: Path) -> None:
    error = stand_in.without_library(tmp_path)
    assert error.startswith("NoDriverError: The NVIDIA driver's library, libcuda.so.1, cannot be loaded")
    assert "configs/cpu-mux.yaml" in error


@pytest.mark.parametrize(("driver", "found"), [(12_030, "12.3"), (11_080, "11.8")])
def test_a_driver_that_is_too_old_is_told_the_version_needed_and_the_one_found(
    stand_in: StandIn, driver: int, found: str
) -> None:
    error = stand_in.error(driver=driver)
    assert error.startswith("OldDriverError: ")
    assert f"supports CUDA {found}; green contexts need 12.4" in error


def test_a_slice_of_a_gpu_in_mig_mode_is_refused_by_name(stand_in: StandIn) -> None:
    error = stand_in.error(name="NVIDIA H200 MIG 1g.18gb")
    assert error.startswith("MigDeviceError: CUDA device 0 is 'NVIDIA H200 MIG 1g.18gb'")
    assert "nvidia-smi -mig 0" in error


def test_a_driver_that_does_not_start_names_the_call_its_result_and_the_cpu_config(stand_in: StandIn) -> None:
    error = stand_in.error(init=999)
    assert error.startswith("CudaUnavailableError: The NVIDIA driver does not start: cuInit failed with CUDA_ERROR_UNKNOWN")
    assert "configs/cpu-mux.yaml" in error


# The rules that the stand-in keeps to, and that the design rests on


@pytest.mark.parametrize(
    ("groups", "units", "flags", "parts", "rest"),
    [(2, 72, 0, [72], 60), (6, 11, 0, [16] * 6, 36), (6, 11, 1, [12] * 6, 60), (2, 1, 0, [8, 8], 116)],
)
def test_the_stand_in_splits_132_sms_by_count_as_the_cuda_guide_says(
    stand_in: StandIn, groups: int, units: int, flags: int, parts: list[int], rest: int
) -> None:
    assert stand_in.ask("groups_by_count", groups=groups, units=units, flags=flags) == [parts, rest]


def test_a_part_cannot_be_split_again(stand_in: StandIn) -> None:
    assert stand_in.ask("split_again") == 915


def test_a_rest_of_no_sms_is_no_resource(stand_in: StandIn) -> None:
    assert [stand_in.ask("described_rest", units=8, sms=sms) for sms in (8, 16)] == [914, 0]


def test_streams_work_after_everything_that_is_garbage_is_collected(stand_in: StandIn) -> None:
    assert stand_in.ask("queries_of_streams", destroy=False) == [0, 0]


def test_a_stream_whose_context_were_destroyed_would_be_detached(stand_in: StandIn) -> None:
    assert stand_in.ask("queries_of_streams", destroy=True) == [917, 917]


@given(
    sms=st.integers(2, 200),
    granularity=st.sampled_from([(4, 2), (8, 8), (2, 2), (1, 1)]),
    driver=st.sampled_from(DRIVERS),
)
@example(sms=2, granularity=(4, 2), driver=12080)  # fewer than a group has, from a driver that does not state it
def test_of_any_device_what_is_made_is_what_is_feasible(
    stand_in: StandIn, sms: int, granularity: tuple[int, int], driver: int
) -> None:
    minimum, alignment = granularity
    if driver == STRUCTURED and alignment == 1:
        return  # no driver of 13.1 knows such a device
    made = stand_in.made(driver=driver, sms=sms, minimum=minimum, alignment=alignment)
    expected = feasible_splits(SmResource(sms, minimum, alignment))
    assert made.splits == [(split.prefill_units, split.decode_units) for split in expected]
    assert_each_split_is_disjoint_and_complete(made)


def assert_each_split_is_disjoint_and_complete(made: Made) -> None:
    for (prefill, decode), (prefill_units, decode_units) in zip(made.lanes, made.splits, strict=True):
        assert (len(prefill.sms), len(decode.sms)) == (prefill_units, decode_units)
        assert (prefill.sms | decode.sms, prefill.sms & decode.sms) == (made.whole.sms, frozenset())
