"""The memory plan of a device: how many pages fit, so that a start that succeeds does not run out of memory later."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from millrace.engine.cache_specs import PAGE_TOKENS, split_budget
from millrace.errors import MachineError, mib

SHARE = 0.9  # of a device's free memory; the rest is for allocator overhead and other processes
RESERVE = 512 << 20  # workspaces of libraries, code of kernels


@dataclass(frozen=True, slots=True)
class WindowNeeds:
    """Needs of the caches of one window. least_pages: of one full-context sequence"""

    tokens: int
    page_bytes: int
    least_pages: int


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Memory that an executor needs, with one page and one state slot more than it offers, for padding rows.

    step_bytes: activations of the largest step; graphs_bytes: CUDA graphs with their inputs
    page_bytes, least_pages: of full-attention layers, and of one full-context sequence in these
    states_bytes: of all slots, and one more for padding rows
    """

    weights_bytes: int
    step_bytes: int
    graphs_bytes: int
    page_bytes: int
    least_pages: int
    windows: tuple[WindowNeeds, ...] = ()
    states_bytes: int = 0

    @property
    def fixed_bytes(self) -> int:
        spare = sum(w.page_bytes for w in self.windows)
        return self.weights_bytes + self.step_bytes + self.graphs_bytes + self.states_bytes + spare + RESERVE

    @property
    def sequence_bytes(self) -> int:
        """Bytes of the pages of one full-context sequence."""
        return self.least_pages * self.page_bytes + self._least_windows

    @property
    def _least_windows(self) -> int:
        return sum(w.least_pages * w.page_bytes for w in self.windows)

    def kv_bytes(self, n_pages: int, window_pages: Sequence[int] = ()) -> int:
        """Return the bytes of `n_pages` pages and of each window's pages."""
        pairs = zip(window_pages, self.windows, strict=True)
        return n_pages * self.page_bytes + sum(n * w.page_bytes for n, w in pairs)

    def total_bytes(self, n_pages: int, window_pages: Sequence[int] = ()) -> int:
        return self.fixed_bytes + self.page_bytes + self.kv_bytes(n_pages, window_pages)

    def pages_in(self, free_bytes: float) -> int:
        """Return how many pages fit into SHARE of the free memory, with windows for one sequence.

        Negative if not even everything else fits.
        """
        return int(SHARE * free_bytes - self.fixed_bytes - self._least_windows) // max(self.page_bytes, 1) - 1

    def fits_in(self, free_bytes: float) -> bool:
        """Return whether one full-context sequence fits."""
        return self.pages_in(free_bytes) >= self.least_pages


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """window_pages: pages of the caches of each window, in the order of `needs`"""

    needs: MemoryNeeds
    n_pages: int
    window_pages: tuple[int, ...] = ()

    @property
    def total_bytes(self) -> int:
        return self.needs.total_bytes(self.n_pages, self.window_pages)


def check_fits(needs: MemoryNeeds, free_bytes: float, smaller: Iterable[tuple[str, MemoryNeeds]] = ()) -> None:
    """Check that a network without caches fits. raises MachineError, naming the alternatives in `smaller` that would"""
    if not needs.fits_in(free_bytes):
        fits = [words for words, other in smaller if other.fits_in(free_bytes)]
        raise MachineError(
            f"this takes {mib(needs.fixed_bytes)} of the GPU: weights {mib(needs.weights_bytes)}, "
            f"steps {mib(needs.step_bytes)}, libraries {mib(RESERVE)}; {mib(SHARE * free_bytes)} may be used",
            f"at most {SHARE:.0%} of the {mib(free_bytes)} that are free",
            f"what would fit: {'; or '.join(fits)}" if fits else "free memory of the GPU, or take a larger one",
        )  # fmt: skip


def plan_device(
    needs: MemoryNeeds, free_bytes: float, max_pages: int, *, kv_memory: int | None = None,
    smaller: Iterable[tuple[str, MemoryNeeds]] = (),
) -> DevicePlan:  # fmt: skip
    """Plan pages for `kv_memory` bytes; by default `max_pages`, or as many as fit.

    smaller: alternatives in words, with their needs; iterated only if this does not fit
    raises MachineError if one full-context sequence does not fit, naming what would
    """
    fits = needs.pages_in(free_bytes)
    if needs.windows:
        room = int(SHARE * free_bytes - needs.fixed_bytes - needs.page_bytes)
        budget = room if kv_memory is None else kv_memory
        pages = _with_windows(needs, budget, max_pages, kv_memory is not None)
        if pages[0] and needs.kv_bytes(pages[0], pages[1:]) <= room:
            return DevicePlan(needs, pages[0], pages[1:])
        raise _too_little(needs, free_bytes, kv_memory, fits, smaller)
    n_pages = min(fits, max_pages) if kv_memory is None else kv_memory // max(needs.page_bytes, 1)
    if needs.least_pages <= n_pages <= fits:
        return DevicePlan(needs, n_pages)
    raise _too_little(needs, free_bytes, kv_memory, fits, smaller)


def _with_windows(needs: MemoryNeeds, budget: int, max_pages: int, use_all: bool) -> tuple[int, ...]:
    """Return the pages, then those of each window, within `budget` bytes; 0 if not enough for one sequence."""
    page = {0: needs.page_bytes, **{w.tokens: w.page_bytes for w in needs.windows}}
    one = {0: needs.least_pages, **{w.tokens: w.least_pages for w in needs.windows}}
    return split_budget(budget, page, one, max_pages // needs.least_pages - 1, use_all=use_all)


def _too_little(
    needs: MemoryNeeds, free_bytes: float, kv_memory: int | None, fits: int, smaller: Iterable[tuple[str, MemoryNeeds]]
) -> MachineError:
    least = needs.sequence_bytes
    if kv_memory is not None and kv_memory < least and fits >= needs.least_pages:
        return MachineError(
            f"--kv-memory {mib(kv_memory)} is less than one sequence takes", f"{mib(least)} for the whole context",
            "raise it, or lower --max-context",
        )  # fmt: skip
    budget = least if kv_memory is None else kv_memory
    result = []
    if kv_memory is not None and fits >= needs.least_pages:
        result.append(f"--kv-memory {needs.kv_bytes(fits, [w.least_pages for w in needs.windows]) >> 20}M")
    elif fits > 0 and needs.page_bytes:
        result.append(f"--max-context {fits * PAGE_TOKENS}")
    result += [words for words, other in smaller if other.fits_in(free_bytes)]
    total = needs.fixed_bytes + needs.page_bytes + budget
    return MachineError(
        f"this takes {mib(total)} of the GPU: weights {mib(needs.weights_bytes)}, "
        f"steps {mib(needs.step_bytes + needs.graphs_bytes)}, KV pages {mib(budget)}, libraries {mib(RESERVE)}; "
        f"{mib(SHARE * free_bytes)} may be used",
        f"at most {SHARE:.0%} of the {mib(free_bytes)} that are free",
        f"what would fit: {'; or '.join(result)}" if result else "free memory of the GPU, or take a larger one",
    )  # fmt: skip
