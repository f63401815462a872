import random

import pytest

from millrace.errors import ConfigError
from millrace.runtime.pages import PagePool, Pages


@pytest.mark.parametrize("seed", range(20))
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


@pytest.mark.parametrize("seed", range(20))
def test_what_is_free_but_kept_agrees_with_plain_lists(seed: int) -> None:
    """Random histories against a reference: what is known stays so until no empty page is left, and the page that was
    given back first goes first."""
    rng, pool = random.Random(seed), PagePool(10)
    held: list[int] = []  # a page as often as it has owners
    known: dict[int, int] = {}  # key -> page
    kept: list[int] = []  # of these, those that nobody owns, in the order of their return
    for key in range(400):
        match rng.choice(["reserve", "share", "find", "index", "release", "release"]) if held else "reserve":
            case "reserve":
                n, empty = rng.randint(1, 3), 10 - len(set(held)) - len(kept)
                pages = pool.reserve(n)
                assert (pages is None) == (n > empty + len(kept))
                gone = kept[: max(0, n - empty)] if pages else []
                assert set(gone) <= set(pages or ()) and not set(kept[len(gone) :]) & set(pages or ())
                known, kept = {k: p for k, p in known.items() if p not in gone}, kept[len(gone) :]
                held += pages or ()
            case "share":
                held += pool.share([rng.choice(held)])
            case "find" if known:
                page = pool.find(rng.choice(list(known)))
                assert page is not None
                held += pool.share([page])
                kept = [p for p in kept if p != page]
            case "index":
                page = rng.choice(held)
                pool.index(page, key)
                known |= {} if page in known.values() else {key: page}
            case "release":
                page = held.pop(rng.randrange(len(held)))
                pool.release([page])
                kept += [page] if page not in held and page in known.values() else []
        assert [pool.find(k) for k in range(key + 1)] == [known.get(k) for k in range(key + 1)]
        assert pool.n_used == len(set(held))


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
