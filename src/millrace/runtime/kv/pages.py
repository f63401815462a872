"""KV pages: their owners, the prefix index over their contents, and the order of eviction.

A full page may enter the index under a key that covers all that its content depends on: a digest of its tokens and of
the previous page's key. So the pages of a prompt form a chain, chains with the same beginning form a tree, and a lookup
walks from the root as far as pages are known. A page whose chain is broken before it could never be found, so eviction
takes the ends of chains: lowest priority first, then least recently used. The last page of a chain may be partly
filled; a sequence that continues from its tokens copies it.
Sources: PagedAttention, arXiv:2309.06180 section 4; RadixAttention, arXiv:2312.07104 section 3.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import NamedTuple

import numpy as np

from millrace.engine.executor import IntArray
from millrace.errors import ConfigError
from millrace.runtime.kv.kv_offload import KvOffloadStore

Pages = tuple[int, ...]
Key = bytes
KEY_BYTES = 32  # so that collisions cannot be found, and tenants with own salts cannot probe each other
DEFAULT_PRIORITY, MAX_CACHE_PRIORITY = 35, 100  # TensorRT-LLM's
# A page is copied if at least an eighth of it is shared, 8 of 64 tokens. These first tokens are also the lookup key, so
# that few of the many pages behind a system prompt are compared. A smaller share would match the few tokens with which
# a template begins every chat.
MIN_SHARED = 1 / 8
MAX_CANDIDATES = 16  # compared pages with the same first tokens, newest first


class PageKey(NamedTuple):
    """The content of a page: the key of the page before it, its tokens, and its capacity in tokens."""

    parent: Key
    tokens: IntArray
    room: int

    @property
    def key(self) -> Key:
        """The page's key, which covers all tokens before it. The number of tokens is part of it."""
        return next_key(self.parent, self.tokens.data.cast("B"))

    @property
    def min_shared(self) -> int:
        """The least number of shared tokens for which the page is copied."""
        return max(1, int(MIN_SHARED * self.room))

    @property
    def beginning(self) -> bytes:
        """The key for partial matches: the previous page's key, and the first tokens."""
        return self.parent + self.tokens[: self.min_shared].tobytes()


def root_key(*parts: bytes) -> Key:
    """Return the root of a chain of keys, from what besides tokens determines keys and values or who reuses them."""
    root = hashlib.blake2b(digest_size=KEY_BYTES, person=b"millrace.root")
    for part in parts:
        root.update(len(part).to_bytes(8, "little"))  # so that the parts cannot run into each other
        root.update(part)
    return root.digest()


def next_key(parent: Key, tokens: bytes | memoryview) -> Key:
    """Return the key of a page with these int32 tokens, whose previous page has the key `parent`."""
    key = hashlib.blake2b(parent, digest_size=KEY_BYTES)
    key.update(tokens)
    return key.digest()


def extend_keys(keys: list[Key], root: Key, tokens: IntArray, n_pages: int, page_tokens: int) -> None:
    """Append to `keys` those of the first pages of `tokens`, until there are `n_pages`."""
    data, page_bytes = tokens.data.cast("B"), page_tokens * tokens.itemsize
    for i in range(len(keys), n_pages):
        keys.append(next_key(keys[-1] if keys else root, data[i * page_bytes : (i + 1) * page_bytes]))


@dataclass(slots=True, eq=False)
class _CachedPage:
    """A page in the index."""

    page: int
    key: Key
    parent: "_CachedPage | None"  # the previous page of its chain; None: it is the first
    n_children: int = 0  # cached pages that follow it
    free: bool = False
    release_time: int = 0  # the time of its last release, by a counter
    priority: int = DEFAULT_PRIORITY
    until_s: float | None = None  # when its priority expires
    content: PageKey | None = None  # for partial matches

    @property
    def is_full(self) -> bool:
        return self.content is None or len(self.content.tokens) == self.content.room


@dataclass(slots=True)
class PrefixIndex:
    """Cached pages by their keys, and the eviction order of those without an owner.

    The owner of a page also owns all pages before it, so free pages can be evicted from the ends of chains. Operations
    take constant time per page, except for the order of free chain ends, which is a heap.
    """

    n_free: int = field(init=False, default=0)  # cached pages without an owner
    n_evicted: int = field(init=False, default=0)
    next_end_s: float = field(init=False, default=math.inf)  # no priority expires before
    _by_key: dict[Key, _CachedPage] = field(init=False, repr=False, default_factory=dict)
    _by_page: dict[int, _CachedPage] = field(init=False, repr=False, default_factory=dict)
    # (priority, release time, page); an entry is valid while its page is a free chain end with these two
    _ends: list[tuple[int, int, int]] = field(init=False, repr=False, default_factory=list)
    _until: list[tuple[float, int]] = field(init=False, repr=False, default_factory=list)  # (until_s, page), a heap
    _n_releases: int = field(init=False, repr=False, default=0)
    _by_beginning: dict[bytes, dict[int, _CachedPage]] = field(
        init=False, repr=False, default_factory=dict
    )  # by page, oldest first

    def __contains__(self, page: int) -> bool:
        return page in self._by_page

    def __len__(self) -> int:
        return len(self._by_page)

    def find(self, keys: Sequence[Key]) -> Pages:
        """Return the pages of the longest known prefix of these keys. Own them before reserving any."""
        result: list[int] = []
        for key in keys:
            entry = self._by_key.get(key)
            if entry is None:
                break
            result.append(entry.page)
        return tuple(result)

    def add(self, page: int, key: Key, previous: int | None) -> int:
        """Add `page`, which follows `previous`, under `key`. Return the page cached under it, which may be another."""
        if (entry := self._by_key.get(key)) is not None:
            return entry.page
        assert page not in self._by_page, f"page {page} is known by another key"
        parent = None if previous is None else self._by_page[previous]
        if parent is not None:
            parent.n_children += 1
        self._by_key[key] = self._by_page[page] = _CachedPage(page, key, parent)
        if parent is not None and parent.priority < DEFAULT_PRIORITY:  # it must not protect a page to be evicted first
            self.retain(page, parent.priority, parent.until_s)
        return page

    def set_content(self, page: int, content: PageKey) -> None:
        """Set the content of a cached page, which enables partial matches."""
        entry = self._by_page[page]
        if entry.content is None:
            entry.content = content._replace(tokens=content.tokens.copy())
            self._by_beginning.setdefault(content.beginning, {})[page] = entry

    def find_part(self, key: PageKey) -> tuple[int, int] | None:
        """Return the page after `key.parent` that shares the most first tokens with it, and their number.

        None if they are less than MIN_SHARED of a page. Own it, because its reader owns all pages before it.
        """
        alike = ((_n_common(tokens, key.tokens), page) for page, tokens in self._candidates(key))
        best = max(alike, default=None)
        return None if best is None else (best[1], best[0])

    def is_worth_adding(self, content: PageKey) -> bool:
        """Whether a partly filled page has enough tokens to be found, and more than any cached one."""
        result, n = self.find_part(content), len(content.tokens)
        return content.min_shared <= n < content.room and (result is None or result[1] < n)

    def remove_prefixes(self, content: PageKey) -> list[int]:
        """Remove unowned pages whose tokens are a proper prefix of these, and return them."""
        gone = [
            page
            for page, tokens in self._candidates(content)
            if _n_common(tokens, content.tokens) == len(tokens) < len(content.tokens) and self._by_page[page].free
        ]
        for page in gone:
            self._remove(self._by_page[page])
        return gone

    def _candidates(self, content: PageKey) -> list[tuple[int, IntArray]]:
        """Return the newest pages with the same first tokens, and their tokens."""
        if len(content.tokens) < content.min_shared:
            return []
        alike = self._by_beginning.get(content.beginning, {})
        newest = islice(reversed(alike.items()), MAX_CANDIDATES)
        return [(page, entry.content.tokens) for page, entry in newest if entry.content is not None]

    def key_of(self, page: int) -> Key:
        """Return the key of a cached page."""
        return self._by_page[page].key

    def mark_unowned(self, page: int) -> None:
        """Mark a page that has lost its last owner."""
        entry = self._by_page[page]
        self._n_releases += 1
        entry.free, entry.release_time = True, self._n_releases
        self.n_free += 1
        self._note_end(entry)

    def mark_owned(self, page: int) -> None:
        """Mark a page that has an owner again."""
        self._by_page[page].free = False
        self.n_free -= 1

    def retain(self, page: int, priority: int, until_s: float | None = None) -> None:
        """Set a page's eviction priority, until `until_s`; None: for as long as it is cached."""
        entry = self._by_page[page]
        entry.priority, entry.until_s = priority, until_s
        self._note_end(entry)
        if until_s is not None:
            heappush(self._until, (until_s, page))
            if len(self._until) > 2 * len(self) + 64:
                self._until = [(k.until_s, k.page) for k in self._by_page.values() if k.until_s is not None]
                heapify(self._until)
            self.next_end_s = self._until[0][0]

    def expire(self, now_s: float) -> None:
        """Reset expired priorities to the default."""
        while self._until and self._until[0][0] <= now_s:
            until_s, page = heappop(self._until)
            entry = self._by_page.get(page)
            if entry is not None and entry.until_s == until_s:
                self.retain(page, DEFAULT_PRIORITY)
        self.next_end_s = self._until[0][0] if self._until else math.inf

    def evict(self) -> tuple[int, Key | None]:
        """Remove the free page to be evicted first. Return it and its key; None if it was not full."""
        while True:
            priority, release_time, page = heappop(self._ends)
            entry = self._by_page.get(page)
            if entry is not None and _counts(entry, priority, release_time):
                break
        self._remove(entry)
        self.n_evicted += 1
        return page, entry.key if entry.is_full else None

    def by_value(self) -> Iterator[tuple[Key, int]]:
        """Yield full pages, those to be evicted last first, each after the pages before it in its chain."""
        reported: set[int] = set()
        for entry in sorted(self._by_page.values(), key=lambda k: (k.priority, k.release_time), reverse=True):
            chain: list[_CachedPage] = []
            at: _CachedPage | None = entry
            while at is not None and at.page not in reported:
                chain.append(at)
                reported.add(at.page)
                at = at.parent
            yield from ((k.key, k.page) for k in reversed(chain) if k.is_full)

    def _remove(self, entry: _CachedPage) -> None:
        """Remove a free chain end."""
        del self._by_page[entry.page], self._by_key[entry.key]
        if entry.content is not None:
            beginning = entry.content.beginning
            alike = self._by_beginning[beginning]
            del alike[entry.page]
            if not alike:
                del self._by_beginning[beginning]
        self.n_free -= 1
        if entry.parent is not None:
            entry.parent.n_children -= 1
            self._note_end(entry.parent)

    def _note_end(self, entry: _CachedPage) -> None:
        if not entry.free or entry.n_children:
            return
        heappush(self._ends, (entry.priority, entry.release_time, entry.page))
        if len(self._ends) > 2 * self.n_free + 64:  # most entries are outdated; amortized, this is free
            ends = (k for k in self._by_page.values() if k.free and not k.n_children)
            self._ends = [(k.priority, k.release_time, k.page) for k in ends]
            heapify(self._ends)


def _counts(entry: _CachedPage, priority: int, release_time: int) -> bool:
    return entry.free and not entry.n_children and (entry.priority, entry.release_time) == (priority, release_time)


def _n_common(entry: IntArray, tokens: IntArray) -> int:
    n = min(len(entry), len(tokens))
    differs = np.flatnonzero(entry[:n] != tokens[:n])
    return int(differs[0]) if len(differs) else n


@dataclass(slots=True)
class PagePool:
    """`n_pages` pages with ids 0 .. n_pages-1, each free or with a number of owners.

    A page with several owners is full and never written again; only a single owner appends to a page. A cached page
    without owners is free, but can be found until it is the only free page left; then it is evicted to the KV offload
    store, if any.
    raises ConfigError for a pool without pages.
    """

    n_pages: int
    tier: KvOffloadStore | None = None
    index: PrefixIndex = field(init=False, default_factory=PrefixIndex)
    _empty: list[int] = field(init=False, repr=False)
    _owners: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.n_pages < 1:
            raise ConfigError(f"room for {self.n_pages} KV pages", expected="at least 1", fix="raise the KV budget")
        self._empty, self._owners = list(range(self.n_pages))[::-1], [0] * self.n_pages
        if self.tier is not None:
            self.tier.cached_pages = self.index.by_value

    @property
    def n_free(self) -> int:
        return len(self._empty) + self.index.n_free

    @property
    def n_used(self) -> int:
        return self.n_pages - self.n_free

    def reserve(self, n: int) -> Pages | None:
        """Take `n` pages with one owner each. Return None, and take nothing, if fewer are free."""
        assert n >= 0, f"reserving {n} pages"
        if n > self.n_free:
            return None
        return self._own(tuple(self._empty.pop() if self._empty else self._give_up() for _ in range(n)))

    def share(self, pages: Iterable[int]) -> Pages:
        """Add an owner to every page. Each must have an owner or be in the index."""
        shared = tuple(pages)
        for p in shared:
            if not self._owners[p]:
                assert p in self.index, f"sharing a free page of {shared}"
                self.index.mark_owned(p)
        return self._own(shared)

    def release(self, pages: Iterable[int]) -> None:
        """Remove an owner from every page; a page without owners is free again."""
        for p in pages:
            assert self._owners[p], f"page {p} released twice"
            self._owners[p] -= 1
            if not self._owners[p]:
                self._free(p)

    def publish(self, page: int, key: Key, previous: int | None, content: PageKey) -> int:
        """Put a page into the index, after `previous` of the same owner. Return the owner's page from now on.

        If the key is cached already, that is the cached page, and `page` is released. `content` enables partial
        matches. A page that is not full is never written again, like any other.
        """
        assert self._owners[page] and (previous is None or self._owners[previous]), (
            f"page {page} or {previous} has no owner"
        )
        entry = self.index.add(page, key, previous)
        self.index.set_content(entry, content)
        if entry != page:
            self.share((entry,))
            self.release((page,))
        self._empty += self.index.remove_prefixes(content)
        return entry

    def promote(self, keys: Sequence[Key], owned: Pages, content: Callable[[int], PageKey]) -> Pages:
        """Return `owned`, the first pages of a chain, extended by pages loaded from the KV offload store, for the same
        owner.

        content: of the chain's i-th page. There must be a free page for each page of the chain.
        """
        pages = list(owned)
        for i in range(len(owned), len(keys)):
            if self.tier is None or keys[i] not in self.tier:
                break
            reserved = self.reserve(1)
            assert reserved is not None, "a page of the chain has no room"
            if not self.tier.fill(keys[i], reserved[0]):
                self.release(reserved)
                break
            pages.append(self.publish(reserved[0], keys[i], pages[-1] if pages else None, content(i)))
        return tuple(pages)

    def clear_index(self) -> bool:
        """Empty the index. Return False, and do nothing, while pages have owners."""
        if self.n_used:
            return False
        self._empty += [self.index.evict()[0] for _ in range(self.index.n_free)]
        if self.tier is not None:
            self.tier.clear()
        return True

    def _give_up(self) -> int:
        page, key = self.index.evict()
        if self.tier is not None and key is not None:
            self.tier.put(key, page)
        return page

    def _free(self, page: int) -> None:
        if page in self.index:
            self.index.mark_unowned(page)
        else:
            self._empty.append(page)

    def _own(self, pages: Pages) -> Pages:
        for p in pages:
            self._owners[p] += 1
        return pages
