// softmax   y = exp(x - max(x)) / sum(exp(x - max(x))) in each row      x, y (elements / n, n) dense
//   Sums go over the row sixteen lanes at a time, then over the lanes by their tree. A NaN makes its row NaN.
#pragma once
namespace millrace::MILLRACE_ISA {

inline void softmax_row(const float* x, int64_t n, float* y) {
  F most = splat(-__builtin_inff()), sums = zero();
  each_vector(0, n, [&](int64_t i, auto lanes) { most = lanes.only(max(lanes.load(x + i), most), most); });
  const F largest_of_all = splat(largest(most));
  each_vector(0, n, [&](int64_t i, auto lanes) {
    const F e = exp(lanes.load(x + i) - largest_of_all);
    lanes.store(y + i, e);
    sums = sums + lanes.only(e, zero());
  });
  const F all = splat(sum(sums));
  each_vector(0, n, [&](int64_t i, auto lanes) { lanes.store(y + i, lanes.load(y + i) / all); });
}

inline void softmax(const SoftmaxArgs& a, StepContext& c) {
  const int64_t n = c.sizes[a.n], rows = c.sizes[a.elements] / n;
  for (Chunk chunk(c, rows, n >= 4096 ? 1 : 4096 / n); chunk.next();)
    for (int64_t row = chunk.begin; row < chunk.end; ++row) softmax_row(a.x + row * n, n, a.y + row * n);
}

}  // namespace millrace::MILLRACE_ISA
