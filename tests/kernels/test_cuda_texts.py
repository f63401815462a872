"""Attention of whole texts on a GPU, in Triton's interpreter, beside the reference."""

import numpy as np
import pytest
import torch

from millrace.engine.cuda.encoder_executor import text_tables
from millrace.kernels import torch_reference
from millrace.kernels.attention.ref import attention

triton_kernels = pytest.importorskip("millrace.kernels.triton_kernels", reason="triton is not installed")


@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "size", "value_size"),
    [
        ([1], 1, 1, 8, 8), ([3, 1, 12], 3, 3, 32, 32), ([1, 70, 64, 5], 4, 4, 24, 40), ([40, 129], 6, 2, 16, 24),
        ([9, 2], 8, 2, 64, 64), ([63, 64, 65, 128], 2, 1, 8, 8),
    ],
)  # fmt: skip
def test_every_token_sees_all_of_its_text(
    lengths: list[int], heads: int, kv_heads: int, size: int, value_size: int
) -> None:
    """Queries, keys and values are columns of one product's rows, as a graph has them; each text alone is the truth."""
    rng = np.random.default_rng(sum(lengths))
    widths = heads * size, kv_heads * size, kv_heads * value_size
    given = torch.from_numpy(rng.standard_normal((sum(lengths), sum(widths) + 3), dtype=np.float32))
    q, k, v = given.split([*widths, 3], 1)[:3]
    shaped = q.reshape(-1, heads, size), k.reshape(-1, kv_heads, size), v.reshape(-1, kv_heads, value_size)
    tables = text_tables(np.array(lengths, np.int32), heads // kv_heads, torch.device("cpu"))
    assert tables.block_rows == (16 if max(lengths) * heads // kv_heads <= 16 else 64)
    exact = [x.numpy().astype(np.float64) for x in shaped]
    want, at = [], 0
    for n in lengths:
        part = slice(at, at := at + n)
        queries, keys, values = (x[part] for x in exact)
        want.append(attention(queries, keys, values, None, 0.3))
    for kernels in (triton_kernels, torch_reference):
        got = kernels.text_attention(shaped, tables, 0.3)
        assert np.abs(got.numpy() - np.concatenate(want)).max() <= 5e-6, kernels.__name__


def test_what_is_not_finite_stays_in_its_text() -> None:
    lengths = np.array([5, 20, 3], np.int32)
    q, k, v = torch.from_numpy(np.random.default_rng(0).standard_normal((3, 28, 2, 16), dtype=np.float32))
    k[7, 1, 3], v[26, 0, 0] = np.inf, np.nan
    with np.errstate(invalid="ignore"):  # the interpreter's products are NumPy's
        got = triton_kernels.text_attention((q, k, v), text_tables(lengths, 1, torch.device("cpu")), 1.0)
    finite = got.isfinite().all(2).numpy()
    assert finite[:5].all() and finite[5:25, 0].all()
    assert (finite[5:25, 1] == (q[5:25, 1, 3] < 0).numpy()).all(), "of a score of -inf nothing is seen"
    assert not finite[25:, 0].any() and finite[25:, 1].all()
