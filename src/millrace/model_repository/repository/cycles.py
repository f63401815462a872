"""Which models of a repository need themselves, perhaps by way of others."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


def rings(needs: Mapping[T, Sequence[T]]) -> dict[T, T]:
    """Each that needs itself, and one of those in its ring that need it. needs: of each, every one that it names

    Each need is looked at twice, however long the rings are.
    """
    part, found = _parts(needs), dict[T, T]()
    for by, needed in needs.items():
        for one in needed:
            if part[one] == part[by]:
                found.setdefault(one, by)
    return found


def _parts(needs: Mapping[T, Sequence[T]]) -> dict[T, int]:
    """Those that need one another have one number (Tarjan's strongly connected components, doi:10.1137/0201010)."""
    begun, lowest, part = dict[T, int](), dict[T, int](), dict[T, int]()
    unfinished: list[T] = []
    path: list[tuple[T, Iterator[T]]] = []  # a stack of our own: Python's ends at a thousand ensembles in a row

    def enter(one: T) -> None:
        begun[one] = lowest[one] = len(begun)
        unfinished.append(one)
        path.append((one, iter(needs[one])))

    for first in needs:
        if first not in begun:
            enter(first)
        while path:
            one, left = path[-1]
            for needed in left:
                if needed not in begun:
                    enter(needed)
                    break
                if needed not in part:
                    lowest[one] = min(lowest[one], begun[needed])
            else:
                path.pop()
                if path:
                    above = path[-1][0]
                    lowest[above] = min(lowest[above], lowest[one])
                while lowest[one] == begun[one] and one not in part:
                    part[unfinished.pop()] = begun[one]
    return part
