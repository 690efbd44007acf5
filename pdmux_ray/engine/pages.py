"""Who owns each KV page of an instance. Knows page numbers and token ids; never touches the KV itself.

    FREE   --take-->                  HELD (by one request)
    HELD   --publish-->               HELD, and found by `match` from now on
    HELD   --share-->                 HELD (by one more request; nobody writes into a published page)
    HELD   --last holder releases-->  CACHED if it was published, else FREE
    CACHED --share-->                 HELD
    CACHED --take, least recently used first--> HELD (its old content is forgotten)
    HELD   --lease-->                 HELD, and LEASED when all its holders have released it, until `end_lease`
    HELD   --expose-->                HELD, and QUARANTINED when its holder has released it, until `end_exposure`

A lease is a holder of its own: a transfer that reads the page. An exposure is one that writes: of a page that one request has
and that is not published, so that nobody else can read what comes in, and nobody gets the page while it still may come.

A published page is known by a digest over its tokens and everything before them, so equal digests mean equal KV.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b

from pdmux_ray.errors import IntegrityError

LOOKS = 8  # at the counts by owner, of somebody who is not the pool's
_DIGEST_BYTES = 32
ROOT_DIGEST = bytes(_DIGEST_BYTES)  # stands before the first page of a sequence


class PageState(Enum):
    """Who frees a page: nobody (it is free), its holders, the cache when room is needed, or the end of a transfer."""

    FREE = "free"
    HELD = "held"
    CACHED = "cached"
    LEASED = "leased"  # only transfers that read it hold it
    QUARANTINED = "quarantined"  # a transfer may still write into it, and nobody else holds it


@dataclass(frozen=True, slots=True)
class Hit:
    """Cached pages that start a token sequence, in order (see `policy.views.PrefixHit`)."""

    pages: tuple[int, ...]
    tokens: int
    evictable_pages: int


def page_digest(before: bytes, tokens: Sequence[int]) -> bytes:
    """The digest of a full page of token ids (0 .. 2**32 - 1) that follows the page with digest `before`.

    Cryptographic, so that no choice of tokens makes a request read another one's KV.
    """
    return blake2b(before + array("I", tokens).tobytes(), digest_size=_DIGEST_BYTES).digest()


def prompt_digests(prompt: Sequence[int], page_size: int) -> list[bytes]:
    """Of the pages that a prompt fills, in order."""
    if isinstance(prompt, Hashed):
        return prompt.digests(page_size)
    data, size, digests = array("I", prompt).tobytes(), page_size * array("I").itemsize, [ROOT_DIGEST]
    for start in range(0, len(data) // size * size, size):
        digests.append(blake2b(digests[-1] + data[start : start + size], digest_size=_DIGEST_BYTES).digest())
    return digests[1:]


class Hashed(tuple[int, ...]):
    """A prompt that remembers the digests of its pages: in a simulation gateway and engine hash the same one."""

    _digests: tuple[int, list[bytes]] = (0, [])

    def digests(self, page_size: int) -> list[bytes]:
        if self._digests[0] != page_size:
            self._digests = (page_size, prompt_digests(tuple(self), page_size))
        return self._digests[1]


class PagePool:
    """The pages of one instance. Not thread-safe: the step loop owns it."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages = pages
        self.page_size = page_size
        self.evictions = 0
        self._free: list[int] = []  # a stack, of pages that were taken before
        self._untouched = 0  # this page, and those after it, were never taken
        self._holders = array("i", bytes(4 * pages))  # leases and exposures included
        self._leases: Counter[int] = Counter()  # page -> transfers that read it
        self._exposed: set[int] = set()
        self._leased = self._quarantined = 0  # pages; kept, because every step tells them
        self._generations = array("q", bytes(8 * pages))
        self._digests: dict[int, bytes] = {}
        self._published: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first; a dict forgets its first one slowly

    @property
    def available(self) -> int:
        """Pages that can be had now: FREE or CACHED."""
        return len(self._free) + len(self._cached) + self.pages - self._untouched

    @property
    def leased(self) -> int:
        """Pages that are LEASED. From any thread."""
        return self._leased

    @property
    def quarantined(self) -> int:
        """Pages that are QUARANTINED. From any thread."""
        return self._quarantined

    def by_owner(self) -> dict[str, int]:
        """How many pages are in each state, together all of them. From any thread: a page that changes its state between two of
        the counts would be in both or in neither, so two looks must agree."""
        counts = self._counts()
        for _ in range(LOOKS):
            counts, before = self._counts(), counts
            if counts == before:
                break
        counts[PageState.HELD] = self.pages - sum(counts.values())
        return {state.value: counts[state] for state in PageState}

    def _counts(self) -> dict[PageState, int]:
        """Of those that are not HELD."""
        return {
            PageState.FREE: self.available - len(self._cached),
            PageState.CACHED: len(self._cached),
            PageState.LEASED: self.leased,
            PageState.QUARANTINED: self.quarantined,
        }

    def state(self, page: int) -> PageState:
        holders = self._holders[page]
        if holders:
            if page in self._exposed:
                return PageState.HELD if holders > 1 else PageState.QUARANTINED
            return PageState.LEASED if holders == self._leases[page] else PageState.HELD
        return PageState.CACHED if page in self._cached else PageState.FREE

    def take(self, count: int) -> list[int]:
        """Gives `count` pages to one request. Raises IntegrityError when fewer are available: plan before taking."""
        if count > self.available:
            raise IntegrityError(f"{count} pages were asked for, {self.available} of {self.pages} are available")
        taken = []
        for _ in range(count):
            page = self._free.pop() if self._free else self._touch() if self._untouched < self.pages else self._evict()
            self._holders[page] = 1
            self._generations[page] += 1
            taken.append(page)
        return taken

    def generations(self, pages: Iterable[int]) -> tuple[int, ...]:
        """How often each page has been taken so far: with this number an old message about a page is told from a new one."""
        return tuple([self._generations[page] for page in pages])

    def match(self, digests: Iterable[bytes]) -> Hit:
        """The longest run of published pages that these digests start with. Changes nothing."""
        pages = []
        evictable = 0
        for digest in digests:
            page = self._published.get(digest)
            if page is None:
                break
            pages.append(page)
            evictable += not self._holders[page]
        return Hit(tuple(pages), len(pages) * self.page_size, evictable)

    def share(self, hit: Hit) -> None:
        """Adds a holder to each page of a hit."""
        for page in hit.pages:
            if self._holders[page] == 0:
                del self._cached[page]
            elif self._holders[page] == self._leases.get(page):
                self._leased -= 1
            self._holders[page] += 1

    def publish(self, page: int, digest: bytes) -> None:
        """Lets others find a held page whose KV has all been computed. Of two equal pages only the first is published."""
        if not self._holders[page] or page in self._digests or page in self._exposed:
            raise IntegrityError(
                f"page {page} cannot be published: it is {self.state(page).value}, exposed, or was published before"
            )
        if digest not in self._published:
            self._published[digest] = page
            self._digests[page] = digest

    def release(self, pages: Sequence[int]) -> None:
        """One holder gives these pages up, in sequence order. The last pages of a sequence are evicted first."""
        for page in reversed(pages):
            if not self._holders[page]:
                raise IntegrityError(
                    f"page {page} was released by someone who does not hold it: it is {self.state(page).value}"
                )
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page not in self._digests:
                    self._free.append(page)
                else:
                    self._cached[page] = None
            elif page in self._exposed:
                self._quarantined += 1
            elif self._holders[page] == self._leases.get(page):
                self._leased += 1

    def lease(self, pages: Sequence[int]) -> None:
        """A transfer begins to read pages that a request holds. It may do so several times at once."""
        for page in pages:
            if not self._holders[page] or page in self._exposed:
                raise IntegrityError(f"page {page} cannot be leased: it is {self.state(page).value}, or exposed")
            self._holders[page] += 1
            self._leases[page] += 1

    def end_lease(self, pages: Sequence[int]) -> None:
        for page in pages:
            if not self._leases[page]:
                raise IntegrityError(f"a lease of page {page} ends that is not there: it is {self.state(page).value}")
            self._leased -= self._holders[page] == self._leases[page]
            self._leases[page] -= 1
            if not self._leases[page]:
                del self._leases[page]
        self.release(pages)

    def expose(self, pages: Sequence[int]) -> None:
        """A transfer begins to write into pages that one request holds, and nobody can find."""
        for page in pages:
            if self._holders[page] != 1 or page in self._digests or page in self._exposed or self._leases[page]:
                raise IntegrityError(f"page {page} cannot be exposed: it is {self.state(page).value}, shared, or exposed")
            self._holders[page] = 2
            self._exposed.add(page)

    def end_exposure(self, pages: Sequence[int]) -> None:
        """The transfer will write no more: what it wrote is there, and nobody holds the page who did not before."""
        for page in pages:
            if page not in self._exposed:
                raise IntegrityError(f"page {page} was not exposed: it is {self.state(page).value}")
            self._quarantined -= self._holders[page] == 1
            self._exposed.remove(page)
        self.release(pages)

    def freed_by(self, held: Iterable[Sequence[int]]) -> int:
        """By how much `available` would rise if holders gave up these page lists."""
        given_up = Counter(page for pages in held for page in pages)
        return sum(self._holders[page] == count for page, count in given_up.items())

    def _touch(self) -> int:
        self._untouched += 1
        return self._untouched - 1

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        del self._published[self._digests.pop(page)]  # only published pages are cached
        self.evictions += 1
        return page

    def check_integrity(
        self, held: Iterable[Sequence[int]], leased: Iterable[Sequence[int]] = (), exposed: Iterable[Sequence[int]] = ()
    ) -> None:
        """Checks that every page has exactly one owner. Raises IntegrityError.

        `held`: the page lists of all requests; `leased` and `exposed`: of all transfers that read, and that may write.
        """
        leases = Counter(page for pages in leased for page in pages)
        writers = Counter(page for pages in exposed for page in pages)
        if leases != self._leases or writers != Counter(self._exposed):
            raise IntegrityError(
                f"leases are {dict(self._leases)} and exposed pages {self._exposed}, but those of the transfers "
                f"{dict(leases)} and {dict(writers)}"
            )
        counted = Counter(page for pages in held for page in pages) + leases + writers
        if any(self._holders[page] != count for page, count in counted.items()) or sum(self._holders) != counted.total():
            wrong = {page: (n, counted[page]) for page, n in enumerate(self._holders) if n != counted[page]}
            raise IntegrityError(f"pages whose (recorded, actual) holders differ: {wrong}")
        lent = Counter(self.state(page) for page in (*leases, *writers))
        if (lent[PageState.LEASED], lent[PageState.QUARANTINED]) != (self._leased, self._quarantined):
            raise IntegrityError(
                f"{self._leased} pages count as leased and {self._quarantined} in quarantine, but {dict(lent)}"
            )
        free = set(self._free)
        if len(free) != len(self._free) or len(free) + len(self._cached) + len(counted) != self._untouched:
            raise IntegrityError(
                f"{len(self._free)} free + {len(self._cached)} cached + {len(counted)} held is not {self._untouched} pages, "
                f"or a page is free twice ({len(self._free) - len(free)})"
            )
        if not (free.isdisjoint(self._cached) and free.isdisjoint(counted) and self._cached.keys().isdisjoint(counted)):
            raise IntegrityError("a page has two owners")
        named = {digest: page for page, digest in self._digests.items()}
        if named != self._published or any(page not in self._digests for page in self._cached):
            raise IntegrityError("the prefix cache and the pages' digests differ")
        if not free.isdisjoint(self._digests):
            raise IntegrityError("a free page is still published")
