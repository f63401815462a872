"""The names of the numerics classes: weights and activations of a matmul."""

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType

from millrace.kernels.declare import RowFormat, Scaling, WeightFormat
from millrace.kernels.row_storage import Storage


class Precision(StrEnum):
    """W4A8 is 4-bit weights times 8-bit activations; A16 is bfloat16 activations, FP8 weights of E4M3."""

    FP32 = "fp32"
    BF16 = "bf16"
    W8A8 = "w8a8"
    W8A16 = "w8a16"
    W4A8 = "w4a8"
    W4A16 = "w4a16"
    FP8A16 = "fp8a16"

    @property
    def weights(self) -> WeightFormat:
        return _WEIGHTS[self]

    @property
    def bits(self) -> int:
        """Bits of a quantized weight."""
        return 4 if self.weights == WeightFormat.W4 else 8

    @property
    def quantised(self) -> bool:
        """Whether its weights are integers, in groups that share a scale."""
        return self.weights in (WeightFormat.W8, WeightFormat.W4)

    @property
    def coded(self) -> bool:
        """Whether its weights are codes with scales, integers or E4M3."""
        return self.quantised or self.weights == WeightFormat.FP8

    @property
    def takes_bytes(self) -> bool:
        """Whether its activations have 8 bits, with a scale per group."""
        return self.value.endswith("a8")

    def storage(self, group: int, hadamard: bool = False) -> Storage:
        """Return how the activations of such a matmul are stored.

        hadamard: groups are transformed before they become int8 (kernels/matmul/pack.py)
        """
        q8 = RowFormat.HADAMARD_Q8 if hadamard else RowFormat.Q8
        packed = q8 if self.takes_bytes else RowFormat.BF16
        return Storage(RowFormat.F32 if self == Precision.FP32 else packed, group if self.quantised else 0)


BF16_BY_TILES = "bf16 by tiles"  # the same weights and activations, summed as by AMX

SCALING_WORDS: Mapping[int, str] = MappingProxyType({
    Scaling.PLAIN: "", Scaling.MINIMUMS: "with minimums", Scaling.LEVELS: "in two levels",
    Scaling.LEVELS_MINIMUMS: "in two levels with minimums",
})  # fmt: skip

_INTEGERS = re.compile(r"\bw[48]a")


def with_groups(parts: Sequence[str], groups: str) -> list[str]:
    """Insert words for groups after the first precision that has groups: "fp8a16", "lm_head w8a16 g128"."""
    first = next((i for i, part in enumerate(parts) if _INTEGERS.search(part)), len(parts) - 1)
    return [f"{part} {groups}" if groups and i == first else part for i, part in enumerate(parts)]


HADAMARD = "by Hadamard"  # codes of transformed groups

_WEIGHTS = {
    Precision.FP32: WeightFormat.F32,
    Precision.BF16: WeightFormat.BF16,
    Precision.W8A8: WeightFormat.W8,
    Precision.W8A16: WeightFormat.W8,
    Precision.W4A8: WeightFormat.W4,
    Precision.W4A16: WeightFormat.W4,
    Precision.FP8A16: WeightFormat.FP8,
}
