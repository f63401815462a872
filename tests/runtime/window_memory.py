"""What the fake executor keeps of one window."""

from collections import Counter
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from millrace.engine.executor import StepInputs, WindowLimits, WindowPages


class WindowMemory:
    """What is in the pages of one window: each token with its position, and whatever was said before it."""

    def __init__(self, limits: WindowLimits, page_tokens: int) -> None:
        self._tokens, self._size, self._n_pages = limits.tokens, page_tokens, limits.n_pages
        self._held: dict[tuple[int, int], tuple[int, int]] = {}  # (page, slot) -> position, token

    def store(self, step: StepInputs, window: WindowPages) -> None:
        holders = Counter(window.pages.tolist())
        assert all(0 <= page < self._n_pages for page in holders), holders
        for source, target in () if window.copies is None else window.copies.tolist():
            assert holders[target] == 1 and source != target
            for slot in range(self._size):
                self._held.pop((target, slot), None)
                if (source, slot) in self._held:
                    self._held[target, slot] = self._held[source, slot]
        for s, (lo, hi) in enumerate(pairwise(step.starts.tolist())):
            first, table = self._table(window, s)
            start = int(step.positions[lo])
            assert first <= max(0, start - self._tokens + 1) // self._size, "a page of the window was left"
            assert first == max(0, start - self._tokens + 1) // self._size, "a page before the window is still held"
            assert first + len(table) == -(-(start + hi - lo) // self._size), "pages for this step, and no more"
            for position, token in zip(range(start, start + hi - lo), step.tokens[lo:hi].tolist(), strict=True):
                page, slot = table[position // self._size - first], position % self._size
                assert holders[page] == 1, "writing a page that others hold"
                self._held[page, slot] = position, token

    def check(self, window: WindowPages, s: int, history: NDArray[np.int64]) -> None:
        """The last tokens of a history are read as the window has them."""
        first, table = self._table(window, s)
        n = len(history)
        for position in range(max(0, n - self._tokens), n):
            place = table[position // self._size - first], position % self._size
            assert self._held.get(place) == (position, history[position]), "a token is not in its window"

    @staticmethod
    def _table(window: WindowPages, s: int) -> tuple[int, list[int]]:
        pages = window.pages[window.page_starts[s] : window.page_starts[s + 1]].tolist()
        assert len(set(pages)) == len(pages), "a page twice"
        return int(window.first[s]), pages
