"""The memory plan of one step: the offset of each activation, reusing memory that is no longer needed."""

from dataclasses import dataclass

ALIGN = 64


@dataclass(frozen=True, slots=True)
class Buffer:
    """Bytes that are live from the step `first` to the step `last`, both included."""

    name: str
    nbytes: int
    first: int
    last: int

    def overlaps(self, other: "Buffer") -> bool:
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """offsets[i] belongs to buffers[i]; lower_bound: the most bytes live at one step, which any plan needs."""

    buffers: tuple[Buffer, ...]
    offsets: tuple[int, ...]
    total_bytes: int
    lower_bound: int


def plan_memory(buffers: list[Buffer]) -> MemoryPlan:
    """Plan greedily by size: each buffer, largest first, gets the lowest gap that is free for its lifetime.

    source: arXiv:2001.03288, "Greedy by Size for Offset Calculation"
    """
    sizes = [-(-b.nbytes // ALIGN) * ALIGN for b in buffers]
    placed: list[tuple[int, int]] = []  # (offset, index)
    offsets = [0] * len(buffers)
    for i in sorted(range(len(buffers)), key=lambda i: (-sizes[i], buffers[i].first)):
        at = 0
        for offset, j in placed:
            if buffers[i].overlaps(buffers[j]):
                if offset - at >= sizes[i]:
                    break
                at = max(at, offset + sizes[j])
        offsets[i] = at
        placed.append((at, i))
        placed.sort()
    total = max((o + s for o, s in zip(offsets, sizes, strict=True)), default=0)
    return MemoryPlan(tuple(buffers), tuple(offsets), total, _lower_bound(buffers, sizes))


def _lower_bound(buffers: list[Buffer], sizes: list[int]) -> int:
    """Return the most bytes live at one step; checking each buffer's first step is enough."""
    return max(
        (
            sum(s for b, s in zip(buffers, sizes, strict=True) if b.first <= at <= b.last)
            for at in {b.first for b in buffers}
        ),
        default=0,
    )
