from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdmux_ray.serve.prefixes import PrefixIndex

PAGE = 4


def index(lifetime_s: float = 60.0) -> PrefixIndex:
    return PrefixIndex(PAGE, lifetime_s)


def send(known: PrefixIndex, name: str, prompt: range, most_pages: int = 100, now: float = 0.0) -> None:
    known.sent(name, known.pages(prompt), most_pages, now)


def cached(known: PrefixIndex, prompt: list[int] | range, now: float = 0.0) -> dict[str, int]:
    return known.cached(known.pages(prompt), now)


def test_a_prompt_is_thought_to_be_where_it_was_sent_but_for_its_last_token() -> None:
    known = index()
    send(known, "a", range(12))
    assert cached(known, range(12)) == {"a": 8}
    assert cached(known, range(13)) == {"a": 8}
    assert cached(known, range(8)) == {"a": 4}


def test_of_another_prompt_the_pages_count_that_begin_alike() -> None:
    known = index()
    send(known, "a", range(13))
    send(known, "b", range(5))
    assert cached(known, [*range(8), *range(50, 99)]) == {"a": 8, "b": 4}
    assert cached(known, [1, *range(1, 12)]) == {}


def test_what_was_sent_long_ago_is_forgotten_and_what_is_sent_again_is_not() -> None:
    known = index(lifetime_s=10.0)
    send(known, "a", range(13), now=0.0)
    send(known, "a", range(5), now=8.0)
    assert cached(known, range(13), now=10.0) == {"a": 12}
    assert cached(known, range(13), now=11.0) == {"a": 4}
    assert cached(known, range(13), now=19.0) == {}


def test_no_more_is_remembered_than_an_instance_has_pages_and_the_ends_of_old_prompts_go_first() -> None:
    known = index()
    send(known, "a", range(13), most_pages=4)
    send(known, "a", range(100, 109), most_pages=4)
    assert cached(known, range(100, 109)) == {"a": 8}
    assert cached(known, range(13)) == {"a": 8}


def test_an_instance_that_is_gone_is_forgotten() -> None:
    known = index()
    send(known, "a", range(13))
    send(known, "b", range(13))
    known.keep_only({"b", "c"})
    assert cached(known, range(13)) == {"b": 12}


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=30), max_size=12),
    st.lists(st.integers(0, 1), min_size=1, max_size=30),
)
def test_what_is_thought_to_be_cached_is_the_longest_common_beginning_in_whole_pages(
    prompts: list[list[int]], prompt: list[int]
) -> None:
    known = index()
    for sent in prompts:
        known.sent("a", known.pages(sent), 10_000, 0.0)

    def common(sent: list[int]) -> int:
        most = min((len(sent) - 1) // PAGE, (len(prompt) - 1) // PAGE)
        return max(PAGE * pages for pages in range(most + 1) if sent[: PAGE * pages] == prompt[: PAGE * pages])

    expected = max(map(common, prompts), default=0)
    assert cached(known, prompt) == ({"a": expected} if expected else {})
