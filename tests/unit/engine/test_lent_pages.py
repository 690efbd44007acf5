"""Pages that other instances read or write: nobody gets one before that has ended; nothing else changes for their holders."""

from __future__ import annotations

from functools import partial

import pytest

from pdmux_ray.engine.pages import Hit, PagePool, PageState
from pdmux_ray.errors import IntegrityError

from .test_pages import chain, publish


def test_a_leased_page_is_free_when_it_has_been_released_and_read_in_either_order() -> None:
    for released_first in (True, False):
        pool = PagePool(4, 2)
        pages = pool.take(2)
        pool.lease(pages)
        assert [pool.state(page) for page in pages] == [PageState.HELD] * 2
        (pool.release if released_first else pool.end_lease)(pages)
        assert [pool.state(page) for page in pages] == [PageState.LEASED if released_first else PageState.HELD] * 2
        assert (pool.leased, pool.available) == (2 * released_first, 2)
        (pool.end_lease if released_first else pool.release)(pages)
        assert (pool.leased, pool.available) == (0, 4)
        pool.check_integrity([])


def test_a_leased_page_can_be_published_shared_and_leased_again() -> None:
    pool = PagePool(4, 2)
    pages = publish(pool, [1, 2])
    pool.lease(pages)
    pool.release(pages)
    pool.share(pool.match(chain([1, 2])))
    pool.lease(pages)
    pool.end_lease(pages)
    assert pool.state(pages[0]) is PageState.HELD
    pool.release(pages)
    assert pool.state(pages[0]) is PageState.LEASED
    pool.end_lease(pages)
    assert pool.state(pages[0]) is PageState.CACHED
    pool.check_integrity([])


def test_pages_count_as_leased_while_transfers_alone_hold_them_whoever_comes_and_goes() -> None:
    pool, counts = PagePool(4, 2), []
    pages = publish(pool, [1, 2])
    share = partial(pool.share, Hit(tuple(pages), 2, 0))
    lease, release, end_lease = (partial(act, pages) for act in (pool.lease, pool.release, pool.end_lease))
    for act in (lease, lease, release, share, release, end_lease, share, end_lease, release):
        act()
        counts.append(pool.leased)
    assert counts == [0, 0, 1, 0, 1, 1, 0, 0, 0]


def test_a_page_in_quarantine_is_had_by_nobody_until_the_writes_have_ended() -> None:
    pool = PagePool(3, 2)
    pages = pool.take(2)
    pool.expose(pages)
    pool.release(pages)
    assert [pool.state(page) for page in pages] == [PageState.QUARANTINED] * 2
    assert (pool.quarantined, pool.available) == (2, 1)
    with pytest.raises(IntegrityError, match="1 of 3 are available"):
        pool.take(2)
    pool.end_exposure(pages)
    assert (pool.quarantined, pool.available) == (0, 3)
    pool.check_integrity([])


def test_what_landed_stays_with_its_holder_who_may_publish_it_from_then_on() -> None:
    pool = PagePool(3, 2)
    pages = pool.take(1)
    pool.expose(pages)
    with pytest.raises(IntegrityError, match="exposed"):
        pool.publish(pages[0], chain([1, 2])[0])
    pool.end_exposure(pages)
    pool.publish(pages[0], chain([1, 2])[0])
    pool.check_integrity([pages])


def test_pages_that_others_read_cannot_be_written_from_outside() -> None:
    pool = PagePool(8, 2)
    published, shared, leased = publish(pool, [1, 2]), pool.take(1), pool.take(1)
    pool.share(Hit(tuple(shared), 2, 0))
    pool.lease(leased)
    for pages in (published, shared, leased, [7]):
        with pytest.raises(IntegrityError, match="cannot be exposed"):
            pool.expose(pages)


def test_a_page_that_is_written_from_outside_cannot_be_read_from_outside() -> None:
    pool = PagePool(8, 2)
    pages = pool.take(1)
    pool.expose(pages)
    for wrong in (pages, [7]):
        with pytest.raises(IntegrityError, match="cannot be leased"):
            pool.lease(wrong)


def test_a_lease_or_an_exposure_ends_once() -> None:
    pool = PagePool(4, 2)
    pages = pool.take(1)
    with pytest.raises(IntegrityError, match="a lease of page 0 ends that is not there"):
        pool.end_lease(pages)
    with pytest.raises(IntegrityError, match="page 0 was not exposed"):
        pool.end_exposure(pages)


def test_a_generation_counts_how_often_a_page_was_given_out() -> None:
    pool = PagePool(2, 2)
    first = pool.take(2)
    assert pool.generations(first) == (1, 1)
    pool.release(first[:1])
    again = pool.take(1)
    assert pool.generations([*again, first[1]]) == (2, 1)


def test_a_cached_page_that_is_shared_again_keeps_its_generation_and_an_evicted_one_does_not() -> None:
    pool = PagePool(1, 2)
    pages = publish(pool, [1, 2])
    pool.release(pages)
    pool.share(pool.match(chain([1, 2])))
    assert pool.generations(pages) == (1,)
    pool.release(pages)
    assert pool.generations(pool.take(1)) == (2,)


def test_the_integrity_check_compares_leases_and_exposures_with_those_of_the_transfers() -> None:
    pool = PagePool(4, 2)
    read, written = pool.take(1), pool.take(1)
    pool.lease(read)
    pool.expose(written)
    pool.check_integrity([read, written], [read], [written])
    for leased, exposed in (([], [written]), ([read], []), ([read, read], [written]), ([written], [read])):
        with pytest.raises(IntegrityError, match="those of the transfers"):
            pool.check_integrity([read, written], leased, exposed)
