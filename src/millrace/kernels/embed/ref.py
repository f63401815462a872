"""Reference of embed."""

from millrace.kernels.arrays import Array, IntArray


def embed(tokens: IntArray, table: Array, scale: float) -> Array:
    """tokens (T,), table (V, N) -> (T, N) = table[tokens] * scale."""
    return table[tokens] * table.dtype.type(scale)
