from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdmux_ray.engine.pages import ROOT_DIGEST, Hashed, Hit, PagePool, PageState, page_digest, prompt_digests
from pdmux_ray.errors import IntegrityError
from tests.examples import tried


def chain(tokens: Sequence[int], page_size: int = 2) -> list[bytes]:
    digests, before = [], ROOT_DIGEST
    for start in range(0, len(tokens) - page_size + 1, page_size):
        before = page_digest(before, tokens[start : start + page_size])
        digests.append(before)
    return digests


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 9))
def test_the_digests_of_a_prompt_are_those_of_its_pages_one_after_the_other(prompt: list[int], page_size: int) -> None:
    hashed = Hashed(prompt)
    assert prompt_digests(prompt, page_size) == chain(prompt, page_size)
    assert prompt_digests(hashed, page_size) == chain(prompt, page_size)
    assert prompt_digests(hashed, page_size + 1) == chain(prompt, page_size + 1)
    assert hashed == tuple(prompt)


def publish(pool: PagePool, tokens: Sequence[int]) -> list[int]:
    """Pages of a sequence, held once and published."""
    digests = chain(tokens)
    pages = pool.take(len(digests))
    for page, digest in zip(pages, digests, strict=True):
        pool.publish(page, digest)
    return pages


def test_a_taken_page_is_held_and_a_released_one_is_free() -> None:
    pool = PagePool(4, 2)
    pages = pool.take(3)
    assert [pool.state(page) for page in pages] == [PageState.HELD] * 3
    assert pool.available == 1
    pool.release(pages)
    assert [pool.state(page) for page in pages] == [PageState.FREE] * 3
    pool.check_integrity([])


class Moving(PagePool):
    """While it is counted first, its owner goes on: a free page is taken, published and cached."""

    moved = False

    @property
    def leased(self) -> int:
        if not self.moved:
            self.moved = True
            self.release(publish(self, [1, 2]))
        return super().leased


def test_counts_by_owner_are_of_one_moment_while_the_owner_goes_on() -> None:
    pool = Moving(4, 2)
    assert pool.by_owner() == {"free": 3, "cached": 1, "held": 0, "leased": 0, "quarantined": 0}


def test_more_pages_than_there_are_is_a_breach_and_takes_none() -> None:
    pool = PagePool(4, 2)
    with pytest.raises(IntegrityError, match="5 pages were asked for, 4 of 4"):
        pool.take(5)
    assert pool.available == 4


def test_a_page_cannot_be_released_twice() -> None:
    pool = PagePool(4, 2)
    pages = pool.take(1)
    pool.release(pages)
    with pytest.raises(IntegrityError, match="does not hold"):
        pool.release(pages)


def test_published_pages_outlive_their_holder_and_are_found_again() -> None:
    pool = PagePool(4, 2)
    pages = publish(pool, [1, 2, 3, 4])
    pool.release(pages)
    assert [pool.state(page) for page in pages] == [PageState.CACHED] * 2
    assert pool.available == 4
    assert pool.match(chain([1, 2, 3, 4])) == Hit(tuple(pages), 4, 2)
    assert pool.match(chain([1, 2, 9, 9])) == Hit((pages[0],), 2, 1)
    assert pool.match(chain([9, 9, 3, 4])) == Hit((), 0, 0)


def test_only_pages_that_nobody_holds_count_as_evictable() -> None:
    pool = PagePool(4, 2)
    pages = publish(pool, [1, 2, 3, 4])
    pool.release(pages[1:])
    assert pool.match(chain([1, 2, 3, 4])).evictable_pages == 1


def test_a_shared_page_is_freed_by_its_last_holder() -> None:
    pool = PagePool(4, 2)
    pages = publish(pool, [1, 2])
    pool.share(pool.match(chain([1, 2])))
    pool.release(pages)
    assert pool.state(pages[0]) is PageState.HELD
    pool.check_integrity([pages])
    pool.release(pages)
    assert pool.state(pages[0]) is PageState.CACHED


def test_the_least_recently_used_page_is_evicted_first_and_no_free_page_is_passed_over() -> None:
    pool = PagePool(3, 2)
    first, second = publish(pool, [1, 2]), publish(pool, [3, 4])
    pool.release(first)
    pool.release(second)
    pool.share(pool.match(chain([1, 2])))
    pool.release(first)
    assert pool.take(1) == [2]
    assert pool.take(1) == second
    assert pool.match(chain([3, 4])).pages == ()
    assert pool.match(chain([1, 2])).pages == tuple(first)


def test_the_end_of_a_sequence_is_evicted_before_its_beginning() -> None:
    pool = PagePool(3, 2)
    pages = publish(pool, [1, 2, 3, 4, 5, 6])
    pool.release(pages)
    assert pool.take(1) == pages[2:]
    assert pool.match(chain([1, 2, 3, 4, 5, 6])).tokens == 4


def test_of_two_equal_pages_the_first_is_found_and_the_second_stays_private() -> None:
    pool = PagePool(4, 2)
    first, second = publish(pool, [1, 2]), publish(pool, [1, 2])
    assert pool.match(chain([1, 2])).pages == tuple(first)
    pool.release(second)
    assert pool.state(second[0]) is PageState.FREE


def test_a_page_is_published_once_and_only_while_held() -> None:
    pool = PagePool(4, 2)
    pages = publish(pool, [1, 2])
    with pytest.raises(IntegrityError, match="cannot be published"):
        pool.publish(pages[0], chain([3, 4])[0])
    with pytest.raises(IntegrityError, match="cannot be published"):
        pool.publish(3, chain([3, 4])[0])


def test_pages_freed_count_shared_pages_only_with_all_their_holders() -> None:
    pool = PagePool(4, 2)
    shared = publish(pool, [1, 2])
    pool.share(pool.match(chain([1, 2])))
    alone = pool.take(2)
    assert pool.freed_by([shared + alone]) == 2
    assert pool.freed_by([shared + alone, shared]) == 3


def test_digests_differ_by_tokens_and_by_what_came_before() -> None:
    digests = {chain([1, 2, 3, 4])[1], chain([3, 4])[0], chain([9, 2, 3, 4])[1], chain([1, 2])[0]}
    assert len(digests) == 4


def test_integrity_check_sees_a_page_that_nobody_owns() -> None:
    pool = PagePool(4, 2)
    pool.take(1)
    with pytest.raises(IntegrityError, match="holders differ"):
        pool.check_integrity([])


def test_integrity_check_sees_a_page_held_by_two_but_counted_once() -> None:
    pool = PagePool(4, 2)
    pages = pool.take(1)
    with pytest.raises(IntegrityError, match="holders differ"):
        pool.check_integrity([pages, pages])


actions = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.lists(st.integers(0, 1), min_size=1, max_size=12)),
        st.tuples(st.just("close"), st.integers(0, 5)),
    ),
    max_size=40,
)


@settings(max_examples=tried(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(actions, st.integers(1, 16))
def test_accounting_stays_exact_whatever_sequences_come_and_go(steps: list[tuple[str, object]], pages: int) -> None:
    pool = PagePool(pages, 2)
    held: list[list[int]] = []
    content: dict[int, bytes] = {}  # what each page was last written with
    for kind, value in steps:
        if kind == "close" and held:
            assert isinstance(value, int)
            pool.release(held.pop(value % len(held)))
        elif kind == "open":
            assert isinstance(value, list)
            digests = chain(value)
            hit = pool.match(digests)
            assert [content[page] for page in hit.pages] == digests[: len(hit.pages)]
            fresh = len(digests) - len(hit.pages)
            if fresh + hit.evictable_pages > pool.available:
                continue
            pool.share(hit)
            taken = pool.take(fresh)
            assert not {page for pages in held for page in pages}.intersection(taken)
            for page, digest in zip(taken, digests[len(hit.pages) :], strict=True):
                content[page] = digest
                pool.publish(page, digest)
            held.append([*hit.pages, *taken])
        pool.check_integrity(held)
        assert pool.available + len({page for pages in held for page in pages}) == pages
