"""Detection of dependency cycles between models of a repository."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


def find_cycles(needs: Mapping[T, Sequence[T]]) -> dict[T, T]:
    """Return each node on a cycle with one predecessor on that cycle. needs: dependencies of every node

    Runs in linear time: each dependency is visited twice.
    """
    part, cycles = _parts(needs), dict[T, T]()
    for parent, needed in needs.items():
        for node in needed:
            if part[node] == part[parent]:
                cycles.setdefault(node, parent)
    return cycles


def _parts(needs: Mapping[T, Sequence[T]]) -> dict[T, int]:
    """Number the strongly connected components (Tarjan, doi:10.1137/0201010)."""
    begun, lowest, part = dict[T, int](), dict[T, int](), dict[T, int]()
    unfinished: list[T] = []
    path: list[tuple[T, Iterator[T]]] = []  # an explicit stack, because Python's recursion limit is a thousand

    def enter(node: T) -> None:
        begun[node] = lowest[node] = len(begun)
        unfinished.append(node)
        path.append((node, iter(needs[node])))

    for first in needs:
        if first not in begun:
            enter(first)
        while path:
            node, left = path[-1]
            for needed in left:
                if needed not in begun:
                    enter(needed)
                    break
                if needed not in part:
                    lowest[node] = min(lowest[node], begun[needed])
            else:
                path.pop()
                if path:
                    above = path[-1][0]
                    lowest[above] = min(lowest[above], lowest[node])
                while lowest[node] == begun[node] and node not in part:
                    part[unfinished.pop()] = begun[node]
    return part
