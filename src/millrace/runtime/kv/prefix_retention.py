"""Prompts that stay in the prefix cache on request: by a priority or a pin, for a time."""

import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from millrace.engine.executor import ExecutorLimits
from millrace.errors import RequestError
from millrace.runtime.kv.pages import Key, PagePool, Pages
from millrace.runtime.request.request import Request
from millrace.runtime.request.request import Sequence as Choice


class Pins:
    """Pinned pages: a pin is one more owner of a page until it expires. The last request for a page determines when.

    At most `max_pages` pages, including those promised to requests in progress, so that no pin fails at their end.
    Any thread may call `promise`; the other methods belong to the pool's thread.
    """

    def __init__(self, pool: PagePool, max_pages: int) -> None:
        self.max_pages = max_pages
        self.next_end_s = math.inf  # no pin expires before
        self._pool = pool
        self._lock = threading.Lock()
        self._promised: Counter[Key] = Counter()
        self.pinned: dict[Key, tuple[int, float]] = {}  # page, and when its pin expires

    def promise(self, keys: Sequence[Key]) -> None:
        """Promise room for the pages that will have these keys. raises RequestError if there is none"""
        with self._lock:
            n_all = len(self.pinned.keys() | self._promised.keys() | set(keys))
            if n_all > self.max_pages:
                raise RequestError(
                    f"cache_pin is set, and with this prompt's {len(keys)} KV pages {n_all} would be pinned",
                    f"at most {self.max_pages}", "pin less, wait until pins end, or serve with a larger --kv-memory",
                    "cache_pin",
                )  # fmt: skip
            self._promised.update(keys)

    def withdraw(self, keys: Sequence[Key]) -> None:
        """Take a promise back: the pages are pinned, or no longer needed."""
        with self._lock:
            self._promised -= Counter(keys)

    def pin(self, keys: Sequence[Key], pages: Pages, until_s: float) -> None:
        """Pin promised pages, which are in the index and owned by the caller."""
        self.withdraw(keys)
        with self._lock:
            for key, page in zip(keys, pages, strict=True):
                if key not in self.pinned:
                    self._pool.share((page,))
                self.pinned[key] = page, until_s
        self.next_end_s = min(self.next_end_s, until_s)

    def expire(self, now_s: float) -> None:
        """Remove expired pins."""
        if now_s < self.next_end_s:
            return
        with self._lock:
            ended = [key for key, (_, until_s) in self.pinned.items() if until_s <= now_s]
            self._pool.release([self.pinned.pop(key)[0] for key in ended][::-1])
            self.next_end_s = min((until_s for _, until_s in self.pinned.values()), default=math.inf)


class Retention:
    """How long prompts stay in the prefix cache. Any thread may call `promise`, the pool's thread the rest.

    on: whether there is a prefix cache
    """

    def __init__(self, limits: ExecutorLimits, pool: PagePool, clock: Callable[[], float], on: bool) -> None:
        n_context = -(-limits.context_tokens // limits.page_tokens)  # pages that any request may need
        self.pins = Pins(pool, max(0, min(pool.n_pages // 2, pool.n_pages - n_context)))
        self._index, self._clock, self._page_tokens, self._on = pool.index, clock, limits.page_tokens, on
        self._has_groups = bool(limits.windows or limits.n_slots)

    def promise(self, request: Request) -> None:
        """Check, before the request is queued, that its cache options can be met. raises RequestError"""
        pins, n_prompt = request.cache.pin, len(request.prompt)
        field = "cache_pin" if pins else "cache_priority"
        if not self._on:
            fix = f"leave {field} out, or serve without --no-prefix-cache"
            raise RequestError(f"{field} is set, and the prefix cache is off", "one that is on", fix, field)
        if self._has_groups:
            raise RequestError(
                f"{field} is set, and this model has layers with a window or a state",
                "a model whose layers all attend to every token", f"leave {field} out", field,
            )  # fmt: skip
        if pins and n_prompt < self._page_tokens:
            raise RequestError(
                f"{field} is set for a prompt of {n_prompt} tokens", f"at least {self._page_tokens}: a full KV page",
                f"leave {field} out", field,
            )  # fmt: skip
        if pins:
            self.pins.promise(self._keys(request))

    def keep(self, seq: Choice) -> None:
        """Apply the request's cache options to the full pages of its prompt, which are in the index now."""
        request, cache = seq.request, seq.request.cache
        keys, until_s = self._keys(request), cache.until_s(self._clock())
        request.has_retention, pages = False, tuple(seq.pages.array[: len(keys)].tolist())
        if cache.pin and until_s is not None:
            self.pins.pin(keys, pages, until_s)
        elif cache.priority is not None:
            for page in pages:
                self._index.retain(page, cache.priority, until_s)

    def withdraw(self, request: Request) -> None:
        """Take the promise back of a request that ended before its prompt was computed."""
        request.has_retention = False
        if request.cache.pin:
            self.pins.withdraw(self._keys(request))

    def expire(self) -> None:
        """End expired pins and priorities."""
        now_s = self._clock()
        self.pins.expire(now_s)
        self._index.expire(now_s)

    def _keys(self, request: Request) -> list[Key]:
        """Return the keys of the full pages of its prompt."""
        return request.choices[0].page_keys(len(request.prompt) // self._page_tokens, self._page_tokens)
