"""Encodes a program's derived sizes for the native core (mr_size in native/millrace.h)."""

import ctypes
from collections.abc import Mapping, Sequence

from millrace.engine.io_slots import Size, Slot
from millrace.errors import EngineError
from millrace.graph.dims import Dim, Floor, Product, Symbol, has_divisor, operands, product, range_of
from millrace.kernels.library import SizeArgs

_NUMBER, _TIMES, _OVER, _FLOOR = range(4)
_MAX_NUMBER = 2**31 - 1


def size_args(symbols: Sequence[Symbol], sizes: Sequence[Size]) -> "ctypes.Array[SizeArgs]":
    """Encode derived sizes. raises EngineError for a size that precedes its operands"""
    numbers: dict[Dim, int] = {symbol: i for i, symbol in enumerate(symbols)}
    result = (SizeArgs * len(sizes))()
    for at, size in enumerate(sizes):
        d, parts = size.dim, operands(size.dim)
        if isinstance(d, Symbol) or any(part not in numbers for part in parts):
            raise EngineError(
                f"the size {d} comes before what it is made of", "sizes in their order", "build the engine again"
            )
        if max(map(abs, _numbers_in(d)), default=0) > _MAX_NUMBER:
            raise EngineError(f"the size {d} has a number beyond 32 bits", "smaller numbers", "build the engine again")
        counts = [numbers[part] for part in parts]
        if isinstance(d, Floor):
            result[at] = SizeArgs(_FLOOR, counts[0], d.by, d.add, size.most)
        elif isinstance(d, Product):
            result[at] = SizeArgs(_OVER if has_divisor(d) else _TIMES, *counts, 0, size.most)
        else:
            result[at] = SizeArgs(_NUMBER, d, 0, 0, size.most)
        numbers[d] = len(symbols) + at
    return result


def _numbers_in(d: Dim) -> tuple[int, ...]:
    """Return the numbers of the last operation of an expression."""
    return (d.add, d.by) if isinstance(d, Floor) else (d,) if isinstance(d, int) else ()


def largest(slot: Slot, symbols: Mapping[Symbol, int], sizes: Sequence[Size]) -> int:
    """Return the most elements of an input or output; a dimension with a divisor is among the sizes."""
    elements = product(slot.shape)
    limit = next((size.most for size in sizes if size.dim == elements), None)
    return range_of(elements, {s: (1, most) for s, most in symbols.items()})[1] if limit is None else limit
