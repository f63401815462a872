"""Caches of a sequence besides its full-attention pages: sliding-window pages and fixed-size states.

Each window has its own page pool, and states live in slots of one pool. When a sequence is admitted, the pages and
slots that it can need at most are reserved (the pages of one window plus one chunk; two slots, one that a step reads
and one that it writes), so a running sequence never runs out.

Released pages and slots stay in the prefix cache until they are reused, least recently released first. A prefix hit at
a page boundary needs, in every window, the pages of the last W tokens, and a saved state. Prefill chunks end at page
boundaries, so that states are saved there.
"""

from collections.abc import Callable
from collections.abc import Sequence as Ordered

import numpy as np

from millrace.engine.cache_specs import max_window_pages
from millrace.engine.executor import ExecutorLimits, IntArray, StateSlots, WindowPages
from millrace.errors import ConfigError
from millrace.runtime.kv.int_buffer import IntBuffer
from millrace.runtime.kv.pages import Key
from millrace.runtime.loop_stats import WindowStats

SLOTS_PER_RUNNING_SEQUENCE = 2  # of a running sequence


class WindowTable:
    """The page table of a running sequence in one window: `array` are its pages, from page number `first` on.

    source: a page, co-owned, that the next step copies into the last one
    """

    __slots__ = ("_gone", "_pages", "first", "n_reserved", "source")

    def __init__(self, first: int, n_reserved: int) -> None:
        self._pages, self._gone = IntBuffer(), 0
        self.first, self.n_reserved = first, n_reserved
        self.source: int | None = None

    @property
    def array(self) -> IntArray:
        return self._pages.array[self._gone :]

    @property
    def end(self) -> int:
        """The number of the page after its last one."""
        return self.first + len(self._pages) - self._gone

    def page(self, number: int) -> int | None:
        """Return its page of this number; None if it was released, or is not allocated yet."""
        return int(self.array[number - self.first]) if self.first <= number < self.end else None

    def append(self, page: int) -> None:
        self._pages.append(page)

    def pop_first(self) -> int:
        """Remove and return its first page."""
        page = int(self._pages.array[self._gone])
        self._gone += 1
        self.first += 1
        if 2 * self._gone > len(self._pages):  # so that the buffer stays small
            self._pages, self._gone = IntBuffer(self.array), 0
        return page


class SequenceCaches:
    """The pages and slots of a running sequence in all groups.

    state: the slot of its states after its computed tokens; None: it has none yet. next: the slot that a step writes
    released: what it released before it was known to be finite, each with its pool and key
    """

    __slots__ = ("next", "released", "state", "windows")

    def __init__(self, windows: list[WindowTable], state: int | None) -> None:
        self.windows, self.state = windows, state
        self.next: int | None = None
        self.released: list[tuple[Pool, Key, int]] = []


class Pool:
    """Pages or slots 0 .. n-1. Each is owned (by one or several), cached under its key without an owner, or free."""

    def __init__(self, n: int) -> None:
        self.n, self.n_reserved = n, 0
        self._empty, self._owners = list(range(n))[::-1], [0] * n
        self._keys: dict[int, Key] = {}  # of those that are cached, or will be when their values are known to be finite
        self._n_cached: dict[Key, int] = {}
        self._idle: dict[int, None] = {}  # with a key and without an owner, in the order of their release

    @property
    def n_used(self) -> int:
        return self.n - len(self._empty) - len(self._idle)

    @property
    def n_idle(self) -> int:
        return len(self._idle)

    def find(self, key: Key) -> int | None:
        return self._n_cached.get(key)

    def allocate(self) -> int:
        """Return one for one owner, for whom it was reserved."""
        if self._empty:
            page = self._empty.pop()
        else:
            page = next(iter(self._idle))
            del self._idle[page]
            self._forget(page)
        self._owners[page] = 1
        return page

    def acquire(self, page: int) -> None:
        """Add an owner."""
        self._idle.pop(page, None)
        self._owners[page] += 1

    def release(self, page: int) -> None:
        """Remove an owner."""
        assert self._owners[page], f"{page} of {self.n} released twice"
        self._owners[page] -= 1
        if self._owners[page]:
            return
        if page in self._keys:
            self._idle[page] = None
        else:
            self._empty.append(page)

    def assign_key(self, page: int, key: Key) -> None:
        """Set the key under which it will be cached, unless another owner gets it before."""
        if page not in self._keys and key not in self._n_cached:
            self._keys[page] = key

    def publish(self, page: int, key: Key) -> None:
        """Let it be found by its key, if it still has that key and no other page does."""
        if self._keys.get(page) == key:
            self._n_cached.setdefault(key, page)

    def clear(self) -> None:
        """Empty the cache. Nothing may be owned."""
        for page in self._idle:
            self._forget(page)
        self._empty += self._idle
        self._idle.clear()

    def _forget(self, page: int) -> None:
        key = self._keys.pop(page)
        if self._n_cached.get(key) == page:
            del self._n_cached[key]


class WindowPool(Pool):
    """The pages of one window."""

    def __init__(self, tokens: int, n_pages: int) -> None:
        super().__init__(n_pages)
        self.tokens = tokens

    def first_page(self, position: int, page_tokens: int) -> int:
        """Return the number of the first page that the token at this position attends to."""
        return max(0, position - self.tokens + 1) // page_tokens


class CacheGroups:
    """All pools of one scheduler; none if every layer has full attention."""

    def __init__(self, limits: ExecutorLimits) -> None:
        self.windows = [WindowPool(window.tokens, window.n_pages) for window in limits.windows]
        self.slots = Pool(limits.n_slots) if limits.n_slots else None
        self._chunk_tokens, self._page_tokens = limits.max_step_tokens, limits.page_tokens
        if not self.has_room(limits.context_tokens):
            raise ConfigError(
                "window pages or state slots do not suffice for one sequence", "room for one of the whole context",
                "let the engine plan them, or give more",
            )  # fmt: skip

    def __bool__(self) -> bool:
        return bool(self.windows) or self.slots is not None

    def has_room(self, n_tokens: int) -> bool:
        """Return whether a sequence of `n_tokens` in all can run beside the running ones."""
        if self.slots is not None and self.slots.n_reserved + SLOTS_PER_RUNNING_SEQUENCE > self.slots.n:
            return False
        return all(pool.n_reserved + self._max_pages(pool, n_tokens) <= pool.n for pool in self.windows)

    def n_known(self, keys: Ordered[Key]) -> int:
        """Return after how many of these pages a sequence can continue: every group has what it needs there."""
        lengths = [0] * len(self.windows)  # of the unbroken run of known pages that ends here
        most = 0
        for n, key in enumerate(keys, 1):
            is_enough = self.slots is None or self.slots.find(key) is not None
            for i, pool in enumerate(self.windows):
                lengths[i] = lengths[i] + 1 if pool.find(key) is not None else 0
                is_enough = is_enough and lengths[i] >= n - pool.first_page(n * self._page_tokens, self._page_tokens)
            if is_enough:
                most = n
        return most

    def start(self, keys: Ordered[Key], n_tokens: int) -> SequenceCaches:
        """Return the caches of a sequence that continues after the pages of these keys, n_tokens long in all."""
        windows: list[WindowTable] = []
        for pool in self.windows:
            table = WindowTable(
                pool.first_page(len(keys) * self._page_tokens, self._page_tokens), self._max_pages(pool, n_tokens)
            )
            pool.n_reserved += table.n_reserved
            for key in keys[table.first :]:
                table.append(_shared(pool, key))
            windows.append(table)
        if self.slots is None:
            return SequenceCaches(windows, None)
        self.slots.n_reserved += SLOTS_PER_RUNNING_SEQUENCE
        return SequenceCaches(windows, _shared(self.slots, keys[-1]) if keys else None)

    def share_partial_page(self, caches: SequenceCaches, key: Key) -> bool:
        """Let the next step copy a part of the page of this key, in every window; False if it cannot.

        A state cannot be shared in part.
        """
        pages = [pool.find(key) for pool in self.windows]
        if None in pages or self.slots is not None:
            return False
        for pool, table, page in zip(self.windows, caches.windows, pages, strict=True):
            assert page is not None
            pool.acquire(page)
            table.source = page
        return True

    def drop_sources(self, caches: SequenceCaches) -> None:
        for pool, table in zip(self.windows, caches.windows, strict=True):
            if table.source is not None:
                pool.release(table.source)
                table.source = None

    def chunk_length(self, start: int, n: int, is_last: bool) -> int:
        """Return how many of the next `n` tokens a chunk takes, so that it ends where a state is saved.

        is_last: no tokens are known after them. A follower computes the last token again
        """
        if self.slots is None:
            return n
        end = (start + n - is_last) // self._page_tokens * self._page_tokens
        return end - start if end > start else n

    def advance(self, caches: SequenceCaches, start: int, n: int, key_of: Callable[[int], Key | None]) -> None:
        """Allocate pages for tokens start .. start + n - 1, release those before their windows, and allocate a slot.

        key_of: the key of a page by its number; None if others may not find it
        """
        size = self._page_tokens
        for pool, table in zip(self.windows, caches.windows, strict=True):
            while table.first < min(table.end, pool.first_page(start, size)):
                key = key_of(table.first)
                self._release(caches, pool, table.pop_first(), key)
            while table.end * size < start + n:
                table.append(pool.allocate())
        if self.slots is not None and caches.next is None:
            caches.next = self.slots.allocate()
            if caches.state is not None and start % size == 0 and (key := key_of(start // size - 1)) is not None:
                self.slots.assign_key(caches.state, key)
                caches.released.append((self.slots, key, caches.state))

    def commit(self, caches: SequenceCaches) -> None:
        """Make the states that a computed step wrote the current ones."""
        if self.slots is not None and caches.next is not None:
            if caches.state is not None:
                self.slots.release(caches.state)
            caches.state, caches.next = caches.next, None

    def publish(self, caches: SequenceCaches, number: int, key: Key) -> None:
        """Let others find its page of this number, whose values are finite."""
        for pool, table in zip(self.windows, caches.windows, strict=True):
            page = table.page(number)
            if page is not None:
                pool.assign_key(page, key)
                pool.publish(page, key)

    def publish_released(self, caches: SequenceCaches) -> None:
        """Let others find what it has released."""
        for pool, key, page in caches.released:
            pool.publish(page, key)
        caches.released.clear()

    def release(self, caches: SequenceCaches) -> None:
        """Release everything: the sequence no longer runs."""
        self.drop_sources(caches)
        for pool, table in zip(self.windows, caches.windows, strict=True):
            for page in table.array.tolist():
                pool.release(page)
            pool.n_reserved -= table.n_reserved
        if self.slots is not None:
            for slot in (caches.state, caches.next):
                if slot is not None:
                    self.slots.release(slot)
            self.slots.n_reserved -= SLOTS_PER_RUNNING_SEQUENCE

    def stats(self) -> tuple[WindowStats, ...]:
        return tuple(
            WindowStats(tokens=p.tokens, pages_used=p.n_used, pages_kept=p.n_idle, pages_total=p.n)
            for p in self.windows
        )

    def clear(self) -> bool:
        """Empty all caches. Nothing may run."""
        for pool in (*self.windows, *([self.slots] if self.slots is not None else [])):
            pool.clear()
        return True

    def _release(self, caches: SequenceCaches, pool: Pool, page: int, key: Key | None) -> None:
        if key is not None:
            pool.assign_key(page, key)
            caches.released.append((pool, key, page))
        pool.release(page)

    def _max_pages(self, pool: WindowPool, n_tokens: int) -> int:
        return max_window_pages(pool.tokens, n_tokens, self._chunk_tokens, self._page_tokens)


NO_CACHES = SequenceCaches([], None)  # of a sequence that waits, or of a model without groups


def _shared(pool: Pool, key: Key) -> int:
    page = pool.find(key)
    assert page is not None, "a cached page is gone"
    pool.acquire(page)
    return page


def step_windows(sequences: Ordered[SequenceCaches], starts: Ordered[int], page_tokens: int) -> tuple[WindowPages, ...]:
    """Return the window pages of a step. starts: for each sequence, the position of its first token in the step"""
    n_windows = len(sequences[0].windows)
    return tuple(_of_window([m.windows[w] for m in sequences], starts, page_tokens) for w in range(n_windows))


def _of_window(tables: Ordered[WindowTable], starts: Ordered[int], page_tokens: int) -> WindowPages:
    pages = [table.array for table in tables]
    page_starts = np.zeros(len(tables) + 1, np.int32)
    np.cumsum([len(own) for own in pages], out=page_starts[1:])
    copies = [
        (table.source, table.page(start // page_tokens))
        for table, start in zip(tables, starts, strict=True)
        if table.source is not None
    ]
    return WindowPages(
        pages=np.concatenate(pages), page_starts=page_starts, first=np.array([t.first for t in tables], np.int32),
        copies=np.array(copies, np.int32) if copies else None,
    )  # fmt: skip


def step_states(sequences: Ordered[SequenceCaches]) -> StateSlots | None:
    """Return the state slots of a step; None if there are no states."""
    if sequences[0].next is None:
        return None
    write = [caches.next for caches in sequences]
    read = [caches.next if caches.state is None else caches.state for caches in sequences]
    return StateSlots(np.array(read, np.int32), np.array(write, np.int32))
