"""KV pages: who owns which page, and nothing else. Source: PagedAttention, arXiv:2309.06180 section 4."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from millrace.errors import ConfigError

Pages = tuple[int, ...]


@dataclass(slots=True)
class PagePool:
    """`n_pages` pages with ids 0 .. n_pages-1, each free or with a number of owners.

    A page with several owners is full and never written again; only its single owner appends to a page.
    raises ConfigError for a pool without pages.
    """

    n_pages: int
    _free: list[int] = field(init=False, repr=False)
    _owners: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.n_pages < 1:
            raise ConfigError(f"room for {self.n_pages} KV pages", expected="at least 1", mend="raise the KV budget")
        self._free, self._owners = list(range(self.n_pages))[::-1], [0] * self.n_pages

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def n_used(self) -> int:
        return self.n_pages - len(self._free)

    def reserve(self, n: int) -> Pages | None:
        """Take `n` pages with one owner each; None, and nothing taken, when fewer are free."""
        assert n >= 0, f"reserving {n} pages"
        if n > self.n_free:
            return None
        return self._own(tuple(self._free.pop() for _ in range(n)))

    def share(self, pages: Iterable[int]) -> Pages:
        """Give every page one more owner."""
        shared = tuple(pages)
        assert all(self._owners[p] for p in shared), f"sharing a free page of {shared}"
        return self._own(shared)

    def release(self, pages: Iterable[int]) -> None:
        """Take one owner from every page; a page without owners is free again."""
        for p in pages:
            assert self._owners[p], f"page {p} released twice"
            self._owners[p] -= 1
            if not self._owners[p]:
                self._free.append(p)

    def _own(self, pages: Pages) -> Pages:
        for p in pages:
            self._owners[p] += 1
        return pages
