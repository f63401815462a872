import random
from dataclasses import dataclass, field
from heapq import heappop
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings

from millrace.errors import ConfigError
from millrace.runtime.kv.pages import DEFAULT_PRIORITY, Key, PageKey, PagePool, Pages, extend_keys, root_key
from tests.support.drawn import SEEDS, examples

Chain = tuple[int, ...]  # a token a page


def keys_of(chain: Chain) -> list[Key]:
    """A page holds one token here."""
    keys: list[Key] = []
    extend_keys(keys, root_key(), np.array(chain, dtype=np.int32), len(chain), 1)
    return keys


def content_of(chain: Chain, i: int) -> PageKey:
    return PageKey([root_key(), *keys_of(chain)][i], np.array(chain[i : i + 1], np.int32), 1)


@settings(max_examples=examples(20))
@given(seed=SEEDS)
def test_pool_agrees_with_plain_counting(seed: int) -> None:
    rng, pool = random.Random(seed), PagePool(8)
    held: list[Pages] = []
    for _ in range(300):
        match rng.choice(["reserve", "share", "release"]) if held else "reserve":
            case "reserve":
                n, free = rng.randint(1, 4), pool.n_free
                held += filter(None, [pool.reserve(n)])
                assert free - pool.n_free == (n if n <= free else 0), "all or nothing"
            case "share":
                held.append(pool.share(rng.choice(held)))
            case "release":
                pool.release(held.pop(rng.randrange(len(held))))
        assert pool.n_free == 8 - len({p for pages in held for p in pages})  # the reference: what is held is not free
        assert pool.n_used == 8 - pool.n_free


@dataclass(eq=False)
class Owner:
    """As a sequence does: shares what is known, computes the rest, tells of it from its beginning on."""

    chain: Chain
    pages: list[int]
    n_known: int


@dataclass
class Reference:
    """What the index must say, in plain sets: chains as tuples, and the page of each."""

    page_of: dict[Chain, int] = field(default_factory=dict)
    left: dict[Chain, int] = field(default_factory=dict)  # those that nobody owns, and when that began
    priority: dict[Chain, int] = field(default_factory=dict)

    def find(self, chain: Chain) -> Pages:
        n = next((i for i in range(len(chain)) if chain[: i + 1] not in self.page_of), len(chain))
        return tuple(self.page_of[chain[: i + 1]] for i in range(n))

    def evict(self) -> int:
        """A free end: of the lowest priority, of these the one left alone longest."""
        ends = [c for c in self.left if not any(len(d) == len(c) + 1 and d[:-1] == c for d in self.page_of)]
        gone = min(ends, key=lambda c: (self.priority[c], self.left[c]))
        del self.left[gone], self.priority[gone]
        return self.page_of.pop(gone)


class Play:
    """Random owners of a pool of twelve pages, beside the reference; their chains begin alike again and again."""

    def __init__(self, seed: int) -> None:
        self.rng, self.pool, self.ref = random.Random(seed), PagePool(12), Reference()
        self.owners: list[Owner] = []
        self.n_released = 0

    @property
    def held(self) -> set[int]:
        return {p for owner in self.owners for p in owner.pages}

    def admit(self) -> None:
        chain = tuple(self.rng.randrange(2) for _ in range(self.rng.randint(1, 6)))
        shared = self.pool.share(self.pool.index.find(keys_of(chain)))
        assert shared == self.ref.find(chain)
        for i in range(len(shared)):
            self.ref.left.pop(chain[: i + 1], None)
        self.owners.append(Owner(chain, list(shared), len(shared)))
        own = self.reserve(len(chain) - len(shared))
        if own is None:
            self.end(self.owners[-1])
        else:
            self.owners[-1].pages += own

    def reserve(self, n: int) -> Pages | None:
        free = set(range(12)) - self.held
        kept = set(map(self.ref.page_of.__getitem__, self.ref.left))
        assert kept <= free and self.pool.n_free == len(free) and self.pool.index.n_free == len(kept)
        pages = self.pool.reserve(n)
        assert (pages is None) == (n > len(free)), "whatever is free can be had, and nothing else"
        if pages is not None:
            gone = {self.ref.evict() for _ in range(n - len(free - kept))}
            assert gone == kept & set(pages)
        return pages

    def publish(self) -> None:
        owner = self.rng.choice(self.owners)
        keys, before = keys_of(owner.chain), set(owner.pages)
        for i in range(owner.n_known, self.rng.randint(owner.n_known, len(owner.chain))):
            chain, own = owner.chain[: i + 1], owner.pages[i]
            last = owner.pages[i - 1] if i else None
            owner.pages[i] = self.pool.publish(own, keys[i], last, content_of(chain, i))
            assert self.pool.index.find_part(content_of(chain, i)) == (owner.pages[i], 1), "in part, too"
            assert owner.pages[i] == self.ref.page_of.setdefault(chain, own)
            self.ref.priority.setdefault(chain, min(DEFAULT_PRIORITY, self.ref.priority.get(chain[:-1], 100)))
            self.ref.left.pop(chain, None)
            owner.n_known = i + 1
        assert len(set(owner.pages)) == len(owner.pages) == len(before)

    def retain(self) -> None:
        chain = self.rng.choice([*self.ref.page_of])
        self.ref.priority[chain] = self.rng.choice([0, DEFAULT_PRIORITY, 100])
        self.pool.index.retain(self.ref.page_of[chain], self.ref.priority[chain])

    def end(self, owner: Owner) -> None:
        self.owners.remove(owner)
        self.pool.release(owner.pages)
        for i in range(owner.n_known):
            if owner.pages[i] not in self.held:
                self.n_released += 1
                self.ref.left[owner.chain[: i + 1]] = self.n_released

    def turn(self) -> None:
        match self.rng.choice(["admit", "publish", "publish", "end", "retain"]):
            case "admit":
                self.admit()
            case "publish" if self.owners:
                self.publish()
            case "end" if self.owners:
                self.end(self.rng.choice(self.owners))
            case "retain" if self.ref.page_of:
                self.retain()


@settings(max_examples=examples(20))
@given(seed=SEEDS)
def test_the_index_agrees_with_plain_sets(seed: int) -> None:
    """Random histories: what is found, what can be reserved, and what is given up for it."""
    play = Play(seed)
    for _ in range(300):
        play.turn()
        for chain, page in play.ref.page_of.items():
            assert chain[:-1] == () or chain[:-1] in play.ref.page_of, "nobody could reach it"
            assert play.pool.index.find(keys_of(chain))[-1] == page
        assert len(play.pool.index) == len(play.ref.page_of) and play.pool.n_used == len(play.held)
    assert play.pool.index.n_evicted > 2, "or this proves little: of 1,500 histories, none gave up fewer than 6"
    for owner in play.owners[:]:
        play.end(owner)
    assert play.pool.n_free == 12 and play.pool.clear_index() and len(play.pool.index) == 0
    assert sorted(play.pool.reserve(12) or ()) == list(range(12))


def test_p7_whatever_is_free_can_be_evicted() -> None:
    """sglang#30532: an eviction that finds nothing, though 99.8 % of the pool is free.

    Two compute the same page side by side: the second must go on from the first one's, or a page that it owns would
    keep one alive that nobody does.
    """
    pool = PagePool(4)
    first, second = pool.reserve(2), pool.reserve(2)
    assert first is not None and second is not None
    (a, b), (of_a, of_b) = keys_of((1, 2)), (content_of((1, 2), i) for i in (0, 1))
    assert pool.publish(first[0], a, None, of_a) == first[0]
    pool.release(first)
    assert pool.publish(second[0], a, None, of_a) == first[0], "known already: its own is given back"
    assert pool.publish(second[1], b, first[0], of_b) == second[1]
    assert pool.n_free == 2 and pool.reserve(2) is not None and pool.reserve(1) is None
    pool.release((first[0], second[1]))
    assert pool.n_free == 2 and pool.reserve(3) is None
    assert pool.reserve(2) == (second[1], first[0]), "the end of the chain, then its beginning"


def test_entries_that_count_no_more_do_not_pile_up() -> None:
    pool = PagePool(8)
    pages = pool.reserve(8)
    assert pages is not None
    for i, page in enumerate(pages):
        pool.publish(page, keys_of((i,))[0], None, content_of((i,), 0))
    pool.release(pages)
    for _ in range(1000):
        pool.release(pool.share(pages[:4]))
    assert len(pool.index._ends) <= 2 * 8 + 64
    assert pool.reserve(4) == pages[4:], "those that were left alone longest"


def test_10000_admissions_to_a_full_index_do_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, so that no clock is needed: looks at the heap for each page that is given up."""
    n_looks, looks = 0, []

    def counted(heap: list[tuple[int, int, int]]) -> tuple[int, int, int]:
        nonlocal n_looks
        n_looks += 1
        return heappop(heap)

    monkeypatch.setattr("millrace.runtime.kv.pages.heappop", counted)
    rng, pool = random.Random(0), PagePool(256)
    for i in range(10_000):
        chain = (rng.randrange(8), rng.randrange(8), i)
        keys, shared = keys_of(chain), pool.share(pool.index.find(keys_of(chain)))
        own = pool.reserve(3 - len(shared))
        assert own is not None
        held = [*shared, *own]
        for k in range(len(shared), 3):
            held[k] = pool.publish(held[k], keys[k], held[k - 1] if k else None, content_of(chain, k))
        pool.release(held)
        if i % 1000 == 999:
            looks.append(n_looks)
    each = [later - before for before, later in pairwise(looks)]
    assert pool.index.n_evicted > 9_000 and max(each) < 1.2 * min(each) and looks[-1] < 2 * pool.index.n_evicted


def test_keys_tell_tokens_order_and_root_apart() -> None:
    def keys(tokens: list[int], root: Key, page_tokens: int = 2) -> list[Key]:
        made: list[Key] = []
        extend_keys(made, root, np.array(tokens, dtype=np.int32), len(tokens) // page_tokens, page_tokens)
        return made

    base = keys([1, 2, 3, 4], root_key())
    assert keys([1, 2, 3, 5, 9], root_key())[0] == base[0] != base[1]
    assert keys([3, 4, 1, 2], root_key())[1] != base[0] and keys([3, 4], root_key())[0] != base[1]
    roots = [root_key(), root_key(b""), root_key(b"a"), root_key(b"a", b"b"), root_key(b"ab"), root_key(b"", b"ab")]
    assert len({key for root in roots for key in keys([1, 2, 3, 4], root)}) == 2 * len(roots)
    more = base[:1]
    extend_keys(more, root_key(), np.array([1, 2, 3, 4], dtype=np.int32), 2, 2)
    assert more == base, "begun before, and gone on with"


@pytest.mark.parametrize("seed", range(5))
def test_the_page_that_shares_most_is_found(seed: int) -> None:
    """Against a plain search of all that is known; at most 16 are looked at, and here no more begin alike."""
    rng, pool, size = random.Random(seed), PagePool(16), 16
    known: dict[int, tuple[Key, list[int]]] = {}  # what is there, by the key before it
    roots = [root_key(b"a"), root_key(b"b")]
    for _ in range(200):
        after, tokens = rng.choice(roots), [rng.randrange(2) for _ in range(size)]
        if rng.random() < 0.7:
            asked = np.array(tokens[: rng.randint(0, size)], np.int32)
            common = {p: shared(own, asked.tolist()) for p, (root, own) in known.items() if root == after}
            most = max(common.values(), default=0)
            found = pool.index.find_part(PageKey(after, asked, size))
            assert (found is None) == (most < 2) and (found is None or found[1] == common[found[0]] == most)
            continue
        pages = pool.reserve(1)
        assert pages is not None
        known.pop(pages[0], None)
        keys: list[Key] = []
        extend_keys(keys, after, np.array(tokens, np.int32), 1, size)
        if pool.publish(pages[0], keys[0], None, PageKey(after, np.array(tokens, np.int32), size)) == pages[0]:
            known[pages[0]] = after, tokens
        pool.release(pool.index.find(keys))
    assert pool.index.n_evicted > 0
    assert pool.clear_index() and not pool.index._by_beginning


def shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_no_more_than_16_pages_are_looked_at() -> None:
    pool, root = PagePool(40), root_key()
    pages = pool.reserve(40)
    assert pages is not None
    for i, page in enumerate(pages):  # the first shares most
        tokens = np.array([1] * (15 if i == 0 else 8) + [2 + i] * (1 if i == 0 else 8), np.int32)
        pool.publish(page, bytes([i]) * 32, None, PageKey(root, tokens, 16))
    assert pool.index.find_part(PageKey(root, np.array([1] * 15, np.int32), 16)) == (pages[-1], 8), (
        "the newest that are alike"
    )


def test_no_page_is_given_twice() -> None:
    pool = PagePool(5)
    first, second = pool.reserve(3), pool.reserve(2)
    assert first is not None and second is not None and not set(first) & set(second)
    assert pool.reserve(1) is None and pool.reserve(0) == ()


def test_misuse_is_our_mistake() -> None:
    pool = PagePool(2)
    pages = pool.reserve(1)
    assert pages is not None
    pool.release(pages)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(pages)
    with pytest.raises(AssertionError, match="sharing a free page"):
        pool.share(pages)


def test_an_empty_pool_is_a_callers_mistake() -> None:
    with pytest.raises(ConfigError, match="room for 0 KV pages"):
        PagePool(0)
