"""The streams without a GPU: as late as allowed, in any order that events allow, and in no other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdmux_ray.device.cuda.recording import RecordingStreams
from pdmux_ray.types import Split

pytestmark = pytest.mark.cpu

SEEDS = range(40)


def noting(done: list[str], name: str) -> Callable[[], None]:
    return lambda: done.append(name)


@given(st.integers(0, 1000), st.integers(1, 6))
def test_a_stream_does_its_work_in_order(seed: int, count: int) -> None:
    streams, done = RecordingStreams(seed=seed), list[str]()
    for at in range(count):
        streams.whole.run(noting(done, str(at)))
    streams.whole.record().wait()
    assert done == [str(at) for at in range(count)]


def test_nothing_runs_before_somebody_waits() -> None:
    streams, done = RecordingStreams(), list[str]()
    streams.whole.run(noting(done, "work"))
    streams.copies.run(noting(done, "copy"))
    streams.whole.record()
    assert done == []
    assert streams.pending() == 3


def order(seed: int, waits: bool, forget: Callable[[str, str], bool] = lambda waiting, recorded: False) -> list[str]:
    """Of a producer on one stream and a consumer on another one, which waits for it or does not."""
    streams, done = RecordingStreams(seed=seed, forget=forget), list[str]()
    producer, consumer = streams.prefill(Split(6, 2)), streams.decode(Split(6, 2))
    producer.run(noting(done, "produced"))
    event = producer.record()
    if waits:
        consumer.wait_for(event)
    consumer.run(noting(done, "consumed"))
    consumer.record().wait()
    return done


def test_streams_run_in_any_order_that_no_event_forbids() -> None:
    orders = {tuple(order(seed, waits=False)) for seed in SEEDS}
    assert {("consumed",), ("produced", "consumed")} <= orders


def test_a_wait_holds_for_every_seed_and_is_missed_for_some_when_it_is_forgotten() -> None:
    assert {tuple(order(seed, waits=True)) for seed in SEEDS} == {("produced", "consumed")}
    forgotten = {tuple(order(seed, True, lambda waiting, recorded: recorded == "prefill 6")) for seed in SEEDS}
    assert ("consumed",) in forgotten


def test_one_seed_gives_one_order() -> None:
    assert [order(seed, waits=False) for seed in SEEDS] == [order(seed, waits=False) for seed in SEEDS]


def test_waits_reach_through_streams_that_wait_themselves() -> None:
    streams, done = RecordingStreams(seed=1), list[str]()
    first, second, third = streams.copies, streams.prefill(Split(2, 6)), streams.whole
    first.run(noting(done, "1"))
    second.wait_for(first.record())
    second.run(noting(done, "2"))
    third.wait_for(second.record())
    third.run(noting(done, "3"))
    third.record().wait()
    assert done == ["1", "2", "3"]


@pytest.mark.parametrize("seed", SEEDS)
def test_who_asks_again_and_again_is_told_at_last(seed: int) -> None:
    streams = RecordingStreams(seed=seed)
    for _ in range(5):
        streams.whole.run(lambda: None)
    event, asked = streams.whole.record(), 0
    while not event.done():
        asked += 1
        assert asked < 1000
    assert streams.pending() == 0


def test_a_graph_does_when_replayed_what_was_captured_and_nothing_when_captured() -> None:
    streams, counter = RecordingStreams(), torch.zeros(1)
    stream = streams.decode(Split(4, 4))

    def count() -> None:
        counter.add_(1)

    graph = stream.capture(count)
    stream.record().wait()
    assert counter.item() == 0
    stream.replay(graph)
    stream.replay(graph)
    stream.record().wait()
    assert counter.item() == 2
    assert streams.node_contexts(graph) == {streams.context(stream)}


def test_time_is_that_of_the_work_between_two_events() -> None:
    streams = RecordingStreams()
    begin = streams.whole.record()
    streams.whole.run(lambda: None)
    end = streams.whole.record()
    with pytest.raises(RuntimeError, match="wait for them first"):
        end.seconds_since(begin)
    end.wait()
    assert end.seconds_since(begin) > 0


def test_what_fails_comes_out_where_it_is_waited_for() -> None:
    streams = RecordingStreams()
    streams.whole.run(lambda: [][0])
    with pytest.raises(IndexError):
        streams.whole.record().wait()


def test_lanes_have_streams_of_the_splits_and_of_the_whole_device() -> None:
    streams = RecordingStreams()
    assert streams.decode(Split(6, 8)) is streams.whole
    assert streams.prefill(Split(6, 2)) is streams.prefill(Split(6, 8))
    assert [streams.prefill(split).units for split in (*streams.splits, Split(8, 8))] == [6, 4, 2, 8]


@pytest.mark.parametrize("split", [Split(5, 3), Split(6, 4), Split(2, 2)], ids=str)
def test_a_split_that_was_not_made_is_refused_though_its_parts_are_there(split: Split) -> None:
    """As by a GPU: the two lanes might share SMs."""
    streams = RecordingStreams()
    for lane in (streams.decode, streams.prefill):
        with pytest.raises(ValueError, match=r"is not divided .*; the splits are 6/2, 4/4, 2/6"):
            lane(split)
    with pytest.raises(ValueError, match="no prefill lane has 5 SMs"):
        streams.prefill(Split(5, 8))


def test_splits_that_have_as_many_units_for_one_lane_have_a_stream_each() -> None:
    """Where the driver made other sizes than asked."""
    first, second = Split(6, 2), Split(4, 2)
    streams = RecordingStreams(splits=(first, second))
    assert streams.decode(first) is not streams.decode(second)
    assert streams.context(streams.decode(first)) != streams.context(streams.decode(second))
