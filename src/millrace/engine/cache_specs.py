"""KV-cache formats and the caches and states that a model's layers declare, with their sizes in bytes."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

PAGE_TOKENS = 64
# Slots for states: two that a running sequence computes with, and two that the prefix cache holds.
SLOTS_PER_SEQUENCE = 4


class KvFormat(IntEnum):
    """Formats of KV pages: native/step_context.hpp has the layouts, kernels/attention/ref.py the rounding."""

    F32 = 0
    BF16 = 1
    INT8 = 2
    FP8 = 3
    INT4 = 4


@dataclass(frozen=True, slots=True)
class KvFormatSpec:
    """Name and sizes of a format.

    numbers: float32 values stored per token and head with the key, and as many with the value: a scale, a minimum
    columns: a value's size is rounded up to a multiple of this
    """

    name: str
    bits: int
    numbers: int = 0
    columns: int = 16

    def page_bytes(self, key_size: int, value_size: int) -> int:
        """Return the bytes of one page of one head in one layer."""
        width = key_size + -(-value_size // self.columns) * self.columns
        return PAGE_TOKENS * (width * self.bits // 8 + 2 * self.numbers * 4)


KV_FORMATS: Mapping[KvFormat, KvFormatSpec] = {
    KvFormat.F32: KvFormatSpec("fp32", 32), KvFormat.BF16: KvFormatSpec("bf16", 16),
    KvFormat.INT8: KvFormatSpec("int8", 8, 1),
    KvFormat.FP8: KvFormatSpec("fp8", 8, 1), KvFormat.INT4: KvFormatSpec("int4", 4, 2, columns=32),
}  # fmt: skip
KV_CACHE_DTYPES = {spec.name: format for format, spec in KV_FORMATS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """Attention layers of one kind: in each layer, keys (heads, key_size) and values (heads, value_size) of each token.

    place: offset of its pages in the activations, for one run; None: they are kept between a language model's steps
    window: how many tokens its layers attend to: pages with earlier ones are not needed; 0: all
    """

    layers: int
    heads: int
    key_size: int
    value_size: int
    format: KvFormat
    place: int | None = None
    window: int = 0

    def page_bytes(self) -> int:
        """Bytes of one page over all layers and KV heads."""
        return self.layers * self.heads * KV_FORMATS[self.format].page_bytes(self.key_size, self.value_size)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """Layers that keep a state of `floats` per sequence, whose size does not depend on the sequence's length."""

    layers: int
    floats: int


def slot_bytes(states: tuple[StateSpec, ...]) -> int:
    """Return the bytes of the states of one sequence."""
    return sum(4 * state.layers * state.floats for state in states)


def page_bytes(caches: tuple[CacheSpec, ...], window: int | None = None) -> int:
    """Return the bytes of one page in all kept caches, or in those of one window; 0: those with full attention."""
    persistent = (cache for cache in caches if cache.place is None)
    return sum(cache.page_bytes() for cache in persistent if window is None or cache.window == window)


def max_window_pages(window: int, n_tokens: int, chunk_tokens: int, page_tokens: int = PAGE_TOKENS) -> int:
    """Return the most pages of a window that a sequence of n_tokens holds at a time if it is computed in chunks of
    chunk_tokens, with one more as the source of a copy.

    The window before a chunk's first token may begin anywhere in a page.
    """
    return min((window + chunk_tokens - 2) // page_tokens + 2, -(-n_tokens // page_tokens)) + 1


def windows_of(caches: tuple[CacheSpec, ...]) -> tuple[int, ...]:
    """Return the windows of the kept caches, each once. Caches of one window share their page tables."""
    return tuple(dict.fromkeys(cache.window for cache in caches if cache.place is None and cache.window))


def split_budget(
    budget: int, page: Mapping[int, int], need: Mapping[int, int], extra: int, *, use_all: bool
) -> tuple[int, ...]:  # fmt: skip
    """Return the number of full-attention pages, then of each window; all 0 if one full-context sequence does not fit.

    page, need: bytes of a page, and pages of a full-context sequence, by window, 0 (full attention) first
    extra: sequences that may run beside the first. use_all: spend the whole budget, not only what a full batch needs
    After the first sequence, windows get at most half of the rest, so that neither long nor short sequences starve.
    """
    windows = [w for w in page if w]
    left = budget - sum(need[w] * page[w] for w in page)
    if left < 0:
        return (0,) * len(page)
    n_more = left / (2 if page[0] else 1) / max(1, sum(need[w] * page[w] for w in windows))
    if page[0] or not use_all:
        n_more = min(n_more, extra)
    of_windows = [need[w] + int(n_more * need[w]) for w in windows]
    left -= sum((n - need[w]) * page[w] for n, w in zip(of_windows, windows, strict=True))
    full = left // page[0] if page[0] else extra * need[0]  # if all layers have windows, these pages take no memory
    return (need[0] + (full if use_all else min(full, extra * need[0])), *of_windows)
