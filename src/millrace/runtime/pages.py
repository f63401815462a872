"""KV pages: who owns which page, and what is in it. Source: PagedAttention, arXiv:2309.06180 section 4."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from millrace.errors import ConfigError

Pages = tuple[int, ...]


@dataclass(slots=True)
class PagePool:
    """`n_pages` pages with ids 0 .. n_pages-1, each free or with a number of owners; with an index of what is known.

    A page with several owners is full and never written again; only its single owner appends to a page. A full page may
    be put into the index under a key that says what is in it. Such a page stays findable when nobody owns it any more:
    it is free but kept, until no other free page is left; the one that was given back first goes first.
    raises ConfigError for a pool without pages.
    """

    n_pages: int
    _empty: list[int] = field(init=False, repr=False)
    _kept: dict[int, None] = field(init=False, repr=False)  # free, and still in the index; the oldest first
    _owners: list[int] = field(init=False, repr=False)
    _page_of: dict[Hashable, int] = field(init=False, repr=False)
    _key_of: dict[int, Hashable] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.n_pages < 1:
            raise ConfigError(f"room for {self.n_pages} KV pages", expected="at least 1", mend="raise the KV budget")
        self._empty, self._owners = list(range(self.n_pages))[::-1], [0] * self.n_pages
        self._kept, self._page_of, self._key_of = {}, {}, {}

    @property
    def n_free(self) -> int:
        return len(self._empty) + len(self._kept)

    @property
    def n_used(self) -> int:
        return self.n_pages - self.n_free

    def reserve(self, n: int) -> Pages | None:
        """Take `n` pages with one owner each; None, and nothing taken, when fewer are free."""
        assert n >= 0, f"reserving {n} pages"
        if n > self.n_free:
            return None
        return self._own(tuple(self._empty.pop() if self._empty else self._forgotten() for _ in range(n)))

    def share(self, pages: Iterable[int]) -> Pages:
        """Give every page one more owner: of its owners' pages, or of those in the index."""
        shared = tuple(pages)
        for p in shared:
            assert self._owners[p] or p in self._kept, f"sharing a free page of {shared}"
            self._kept.pop(p, None)
        return self._own(shared)

    def release(self, pages: Iterable[int]) -> None:
        """Take one owner from every page; a page without owners is free again."""
        for p in pages:
            assert self._owners[p], f"page {p} released twice"
            self._owners[p] -= 1
            if not self._owners[p] and p in self._key_of:
                self._kept[p] = None
            elif not self._owners[p]:
                self._empty.append(p)

    def index(self, page: int, key: Hashable) -> None:
        """From now on the full page `page` is found by `key`, unless another one is already."""
        assert self._owners[page], f"page {page} is nobody's"
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key], self._key_of[page] = page, key

    def find(self, key: Hashable) -> int | None:
        """The page that is known under `key`: take it by `share` before anything else is reserved."""
        return self._page_of.get(key)

    def _forgotten(self) -> int:
        page = next(iter(self._kept))
        del self._kept[page], self._page_of[self._key_of.pop(page)]
        return page

    def _own(self, pages: Pages) -> Pages:
        for p in pages:
            self._owners[p] += 1
        return pages
