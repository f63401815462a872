"""Keys and values that attention keeps: in which formats, and how many bytes a page of them has."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

PAGE_TOKENS = 64


class KvFormat(IntEnum):
    """How pages hold them: native/step_context.hpp has the layouts, kernels/attention/ref.py the roundings."""

    F32 = 0
    BF16 = 1
    INT8 = 2
    FP8 = 3
    INT4 = 4


@dataclass(frozen=True, slots=True)
class Kept:
    """Of a format: what users call it, and what it takes.

    numbers: float32 of each token and head beside its key, and as many beside its value: a scale, a minimum
    columns: to which a value's size is rounded up
    """

    name: str
    bits: int
    numbers: int = 0
    columns: int = 16

    def page_bytes(self, key_size: int, value_size: int) -> int:
        """Of one head in one layer."""
        width = key_size + -(-value_size // self.columns) * self.columns
        return PAGE_TOKENS * (width * self.bits // 8 + 2 * self.numbers * 4)


KEPT: Mapping[KvFormat, Kept] = {
    KvFormat.F32: Kept("fp32", 32), KvFormat.BF16: Kept("bf16", 16), KvFormat.INT8: Kept("int8", 8, 1),
    KvFormat.FP8: Kept("fp8", 8, 1), KvFormat.INT4: Kept("int4", 4, 2, columns=32),
}  # fmt: skip
KV_CACHE_DTYPES = {kept.name: format for format, kept in KEPT.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """Attention layers of one kind: of each token keys (heads, key_size) and values (heads, value_size) in each layer.

    place: where its pages lie in the activations, for one run; None: it is kept between the steps of a language model
    """

    layers: int
    heads: int
    key_size: int
    value_size: int
    format: KvFormat
    place: int | None = None

    def page_bytes(self) -> int:
        """Bytes of one page over all layers and KV heads."""
        return self.layers * self.heads * KEPT[self.format].page_bytes(self.key_size, self.value_size)


def page_bytes(caches: tuple[CacheSpec, ...]) -> int:
    """Of one page in all caches that are kept."""
    return sum(cache.page_bytes() for cache in caches if cache.place is None)
