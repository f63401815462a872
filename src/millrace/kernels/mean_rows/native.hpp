// mean_rows   y[s] = the mean of sequence s's rows of x      x (T, n) at x_stride, sequences packed | y (S, n)
//   summed in the rows' order, so with the same bits whatever lies around them; a sequence without rows gives NaN
#pragma once
namespace millrace::MILLRACE_ISA {

inline void mean_rows(const MeanRowsArgs& a, StepContext& c) {
  const int64_t rows = c.sizes[a.rows_from];
  for (Chunk s(c, c.sizes[a.rows], 1); s.next();) {
    int64_t from = 0;
    for (int64_t before = 0; before < s.begin; ++before) from += a.lengths[before] > 0 ? a.lengths[before] : 0;
    const int64_t length = a.lengths[s.begin] > 0 ? a.lengths[s.begin] : 0;
    from = from < rows ? from : rows;
    const int64_t to = from + length < rows ? from + length : rows;
    const F count = splat(static_cast<float>(to - from));
    each_vector(0, a.n, [&](int64_t i, auto lanes) {
      F total = zero();
      for (int64_t row = from; row < to; ++row) total = total + lanes.load(a.x + row * a.x_stride + i);
      lanes.store(a.y + s.begin * a.n + i, total / count);
    });
  }
}

}  // namespace millrace::MILLRACE_ISA
