// batched_matmul   y[b] = x[b] @ w[b]      x (batch, m, k) | w (batch, k, n), or (k, n) for all | y (batch, m, n), dense floats
//   A plain kernel: sums go over k ascending, each a fused multiply-add, from 0 on. A task is a block of rows.
#pragma once
namespace millrace::MILLRACE_ISA {

constexpr int kBatchedRows = 4;

// Rows r of x and y, `rows` of them, times 16 columns from j on.
template <int Rows, class Lanes>
inline void batched_tile(const float* x, const float* w, float* y, int64_t k, int64_t n, int64_t j, Lanes lanes) {
  F sums[Rows];
  for (int r = 0; r < Rows; ++r) sums[r] = zero();
  for (int64_t i = 0; i < k; ++i) {
    const F columns = lanes.load(w + i * n + j);
    for (int r = 0; r < Rows; ++r) sums[r] = fma(splat(x[r * k + i]), columns, sums[r]);
  }
  for (int r = 0; r < Rows; ++r) lanes.store(y + r * n + j, sums[r]);
}

inline void batched_matmul(const BatchedMatmulArgs& a, StepContext& c) {
  const int64_t m = c.sizes[a.m], k = c.sizes[a.k], n = c.sizes[a.n];
  const int64_t x_elements = c.sizes[a.x_elements], w_elements = c.sizes[a.w_elements], elements = c.sizes[a.elements];
  const int64_t batch = elements / n / m;  // sizes that contradict each other compute nothing
  if (batch == 0 || elements / n != batch * m || elements != batch * m * n || x_elements / k != batch * m ||
      x_elements != batch * m * k || (w_elements != k * n && (w_elements / n != batch * k || w_elements != batch * k * n)))
    return;
  const int64_t blocks = (m + kBatchedRows - 1) / kBatchedRows, own = w_elements == k * n ? 0 : k * n;
  for (Chunk chunk(c, batch * blocks, 1); chunk.next();) {
    const int64_t b = chunk.begin / blocks, first = chunk.begin % blocks * kBatchedRows;
    const float *x = a.x + (b * m + first) * k, *w = a.w + b * own;
    float* y = a.y + (b * m + first) * n;
    if (first + kBatchedRows <= m)
      each_vector(0, n, [&](int64_t j, auto lanes) { batched_tile<kBatchedRows>(x, w, y, k, n, j, lanes); });
    else
      for (int64_t r = 0; r < m - first; ++r)
        each_vector(0, n, [&](int64_t j, auto lanes) { batched_tile<1>(x + r * k, w, y + r * n, k, n, j, lanes); });
  }
}

}  // namespace millrace::MILLRACE_ISA
