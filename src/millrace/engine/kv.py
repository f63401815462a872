"""Keys and values that attention keeps: in which formats, and how many bytes a page of them has."""

from dataclasses import dataclass
from enum import IntEnum

PAGE_TOKENS = 64


class KvFormat(IntEnum):
    F32 = 0
    BF16 = 1
    INT8 = 2  # with a float32 scale for each token and head


KV_CACHE_DTYPES = {"fp32": KvFormat.F32, "bf16": KvFormat.BF16, "int8": KvFormat.INT8}  # as users name them
_BYTES = {KvFormat.F32: 4, KvFormat.BF16: 2, KvFormat.INT8: 1}


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
        """Bytes of one page over all layers: keys [D][64] and values [64][Dv up to 16] of each KV head."""
        width = self.key_size + (self.value_size + 15) // 16 * 16
        scales = 2 * 4 if self.format == KvFormat.INT8 else 0
        return self.layers * self.heads * PAGE_TOKENS * (width * _BYTES[self.format] + scales)


def page_bytes(caches: tuple[CacheSpec, ...]) -> int:
    """Of one page in all caches that are kept."""
    return sum(cache.page_bytes() for cache in caches if cache.place is None)
