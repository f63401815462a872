"""Products of few rows in E4M3 on a GPU, in Triton: weights are read once, and their reading is what takes time."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.kernels.matmul.fp8 import Fp8Rows

BLOCK_M, BLOCK_N, BLOCK_K = 16, 32, 128  # a tensor core's least rows; columns; what goes through at a time


@triton.jit
def few_rows(x, x_scales, w, w_scales, y, M, N, K,
             BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """x (M, K), w (N, K), y (M, N). E4M3's values are float16's, too: products are exact, sums in float32"""
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        left = tl.load(x + row[:, None] * K + k[None], mask=(row[:, None] < M) & (k[None] < K), other=0.0)
        right = tl.load(w + column[None].to(tl.int64) * K + k[:, None],
                        mask=(column[None] < N) & (k[:, None] < K), other=0.0)  # fmt: skip
        total = tl.dot(left.to(tl.float16), right.to(tl.float16), total)
    scale = tl.load(x_scales + row, mask=row < M, other=0.0)[:, None]
    scale *= tl.load(w_scales + column, mask=column < N, other=0.0)[None]
    out = (total * scale).to(y.dtype.element_ty)
    tl.store(y + row[:, None].to(tl.int64) * N + column[None], out, mask=(row[:, None] < M) & (column[None] < N))


def fp8_product(x: Fp8Rows, w: Fp8Rows, dtype: torch.dtype) -> Tensor:
    """x of M rows, w of N -> (M, N) of `dtype`."""
    (m, k), n = x.data.shape, w.data.shape[0]
    y = torch.empty((m, n), dtype=dtype, device=x.data.device)
    grid = triton.cdiv(n, BLOCK_N), triton.cdiv(m, BLOCK_M)
    few_rows[grid](x.data, x.scales, w.data, w.scales, y, m, n, k,
                   BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K)  # fmt: skip
    return y
